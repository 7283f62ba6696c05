"""Charts of figures: latency distributions, goodput against rate, where the time goes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean, median

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from tandem_perf.chart_style import PART_COLORS, line_of, log_seconds
from tandem_perf.records import RequestRecord
from tandem_perf.report_data import ReportData
from tandem_perf.statistics import Statistics

_MAX_POINTS = 400  # of a curve; more cannot be seen
_WIDTH_IN = 11.0


def latency_cdfs(data: ReportData, classes: Sequence[str | None]) -> Figure:
    """A row a length class (None: all requests): TTFT left, ITL right."""
    rows = len(classes)
    figure = Figure(figsize=(_WIDTH_IN, 1.0 + 2.9 * rows), layout="constrained")
    grid = figure.subplots(rows, 2, squeeze=False, sharex="col")
    for (left, right), length_class in zip(grid, classes, strict=True):
        for number, name in enumerate(data.deployments):
            records = [
                record
                for record in data.records(name)
                if record.is_ok and length_class in (None, record.length_class)
            ]
            _cdf(left, [record.ttft_s for record in records], name, number)
            _cdf(right, [gap for record in records for gap in record.gaps_s], name, number)
        who = "all requests" if length_class is None else f"{length_class} prompts"
        left.set_title(f"Time to first token, {who}")
        right.set_title(f"Inter-token latency, {who}")
        left.set_ylabel("share of requests")
        right.set_ylabel("share of gaps")
    for axes in grid.flat:
        axes.set_ylim(0, 1.01)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        log_seconds(axes)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=len(labels))
    return figure


def goodput_by_rate(data: ReportData) -> Figure:
    """Goodput and attainment against the rate that was sent, of all open-loop runs."""
    figure = Figure(figsize=(_WIDTH_IN, 4.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    highest = 0.0
    for number, name in enumerate(data.deployments):
        measured: dict[float, list[Statistics]] = {}
        for run in [*data.sweep.get(name, []), *data.runs[name]]:
            if run.summary.rate is not None:
                measured.setdefault(run.summary.rate, []).append(run.summary.statistics)
        if not measured:
            continue
        rates = sorted(measured)
        goodputs = [median(s.goodput for s in measured[rate]) for rate in rates]
        shares = [median(s.overall.attainment or 0.0 for s in measured[rate]) for rate in rates]
        highest = max(highest, rates[-1])
        left.plot(rates, goodputs, marker="o", label=name, **line_of(number))
        right.plot(rates, shares, marker="o", label=name, **line_of(number))
    left.plot([0, highest], [0, highest], color="#9aa7b2", linewidth=1, label="all in SLO")
    left.set_title("Goodput")
    left.set_ylabel("requests/s in SLO")
    right.set_title("Requests in SLO")
    right.axhline(0.9, color="#9aa7b2", linewidth=1)
    right.set_ylim(0, 1.03)
    right.yaxis.set_major_formatter(PercentFormatter(1.0))
    for axes in (left, right):
        axes.set_xlabel("requests/s sent")
        axes.set_xlim(left=0)
    left.set_ylim(bottom=0)
    left.legend(loc="upper left")
    return figure


def where_time_goes(data: ReportData) -> Figure:
    """CPU per output token by kind of process; mean time to first token by phase and class."""
    names = data.deployments
    classes = data.length_classes
    rows = len(names) * max(1, len(classes))
    height_in = 1.6 + 0.42 * max(rows, len(names))
    figure = Figure(figsize=(_WIDTH_IN, height_in), layout="constrained")
    left, right = figure.subplots(1, 2)
    cpu = {name: _cpu_parts(data, name) for name in names}
    _stacked(left, cpu, "CPU per output token", "ms of CPU per token")
    phases = {
        f"{name}\n{length_class}": parts
        for name in names
        for length_class in classes
        if (parts := _phase_parts(data.records(name), length_class))
    }
    _stacked(right, phases, "Mean time to first token", "seconds")
    return figure


def _cdf(axes: Axes, values: Iterable[float | None], name: str, number: int) -> None:
    ordered = sorted(value for value in values if value is not None and value > 0)
    if not ordered:
        return
    shares = np.linspace(0, 1, min(_MAX_POINTS, max(2, len(ordered))))
    # A staircase for few values would hide how few they are; quantiles are what tables show.
    line = line_of(number)
    axes.plot(np.quantile(ordered, shares), shares, label=name, **line)
    marked = [0.5, 0.95, 0.99]
    axes.plot(np.quantile(ordered, marked), marked, "o", markersize=4.5, color=line["color"])


def _cpu_parts(data: ReportData, name: str) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for run in data.runs[name]:
        costs = run.summary.server_side.cpu_us_per_token if run.summary.server_side else {}
        for kind, spent_us in costs.items():
            found.setdefault(kind, []).append(spent_us / 1e3)
    means = {kind: fmean(values) for kind, values in found.items()}
    return dict(sorted(means.items(), key=lambda part: -part[1]))


def _phase_parts(records: Iterable[RequestRecord], length_class: str) -> dict[str, float]:
    """Mean seconds; empty if the server gives no timings."""
    waits, prefills, others = [], [], []
    for record in records:
        server, ttft_s = record.server, record.ttft_s
        if record.length_class != length_class or ttft_s is None or not server:
            continue
        if server.prefill_ms is None or server.queue_ms is None:
            continue
        waits.append(server.queue_ms / 1e3)
        prefills.append(server.prefill_ms / 1e3)
        others.append(max(0.0, ttft_s - waits[-1] - prefills[-1]))
    if not waits:
        return {}
    return {"queue": fmean(waits), "prefill": fmean(prefills), "rest": fmean(others)}


def _stacked(axes: Axes, bars: dict[str, dict[str, float]], title: str, unit: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(unit)
    axes.grid(False, axis="y")
    parts = list(dict.fromkeys(part for shares in bars.values() for part in shares))
    if not parts:
        axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes)
        return
    starts = {name: 0.0 for name in bars}
    shown, rest = parts[:6], parts[6:]
    for number, part in enumerate([*shown, *(["other"] if rest else [])]):
        for name, shares in bars.items():
            width = shares.get(part, 0.0) if part in shown else sum(shares.get(p, 0) for p in rest)
            label = part if name == next(iter(bars)) else None
            axes.barh(name, width, left=starts[name], height=0.62, label=label,
                      color=PART_COLORS[number], edgecolor="white", linewidth=0.8)  # fmt: skip
            starts[name] += width
    for place, total in enumerate(starts.values()):
        axes.text(total, place, f" {total:.3g}", va="center", fontsize=8.5)
    axes.invert_yaxis()
    axes.set_xlim(right=max(starts.values()) * 1.15)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, columnspacing=1.2)
