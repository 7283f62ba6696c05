"""Charts over time: which request was where, and how full the workers were."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, PercentFormatter

from tandem_perf.chart_style import INK, MUTED, PART_COLORS, class_colors
from tandem_perf.pool_spans import WAITING, Phase, PoolSpans, pool_spans
from tandem_perf.report_data import Run
from tandem_perf.timeline import TimelineRow, WorkerState

_WIDTH_IN = 11.0
_LANE_IN = 0.13
_MIN_POOL_IN = 0.62
_ALPHA = {
    Phase.WAITING: 0.28,
    Phase.PREFILL: 1.0,
    Phase.TO_FIRST_TOKEN: 0.8,
    Phase.TRANSFER: 1.0,
    Phase.DECODE: 0.42,
}
_TRANSFER_COLOR = INK
_LONG_PHASES = (Phase.PREFILL, Phase.TO_FIRST_TOKEN, Phase.DECODE)


def pool_timeline(
    run: Run, title: str, classes: list[str], duration_s: float
) -> Figure | None:
    """A band a worker, a bar a request; None if no request got a token."""
    pools = pool_spans(run.records)
    if not pools:
        return None
    heights = [max(_MIN_POOL_IN, pool.num_lanes * _LANE_IN + 0.12) for pool in pools]
    figure = Figure(figsize=(_WIDTH_IN, sum(heights) + 1.35), layout="constrained")
    grid = figure.subplots(len(pools), 1, squeeze=False, sharex=True, height_ratios=heights)
    colors = class_colors(classes)
    for (axes,), pool, height in zip(grid, pools, heights, strict=True):
        _bars(axes, pool, colors)
        spare = height / _LANE_IN - pool.num_lanes  # a lane has the same height in every pool
        axes.set_ylim(pool.num_lanes - 0.5 + spare / 2, -0.5 - spare / 2)
        axes.set_yticks([])
        axes.set_ylabel(pool.name, rotation=0, ha="right", va="center", color=INK)
        axes.spines["left"].set_visible(False)
    last = grid[-1][0]
    last.set_xlim(0, duration_s)
    last.set_xlabel("seconds since the start of the run")
    figure.suptitle(title, x=0.01, ha="left", fontsize=10.5, fontweight="bold")
    used = list(dict.fromkeys(span.phase for pool in pools for span in pool.spans))
    figure.legend(
        handles=[*_class_legend(colors), *_phase_legend(used)],
        loc="outside lower left", ncols=8, handlelength=1.4, columnspacing=1.4,
    )  # fmt: skip
    return figure


def occupancy(runs: dict[str, Run], duration_s: float) -> Figure | None:
    """A row a deployment: sequences that wait and run, KV blocks in use; None without metrics."""
    runs = {name: run for name, run in runs.items() if any(r.workers for r in run.timeline)}
    if not runs:
        return None
    figure = Figure(figsize=(_WIDTH_IN, 0.5 + 2.5 * len(runs)), layout="constrained")
    grid = figure.subplots(len(runs), 3, squeeze=False, sharex=True, sharey="col")
    for row, (name, run) in zip(grid, runs.items(), strict=True):
        waiting, running, kv = row
        workers = sorted({w.worker for line in run.timeline for w in line.workers})
        for number, worker in enumerate(sorted(workers, key=lambda w: not w.startswith("prefill"))):
            color = PART_COLORS[number % len(PART_COLORS)]
            seen = [(r.at_s, s) for r in run.timeline if (s := _state(r, worker)) is not None]
            times = [at_s for at_s, _ in seen]
            for axes, values in (
                (waiting, [state.waiting for _, state in seen]),
                (running, [state.running for _, state in seen]),
                (kv, [_kv_in_use(state) for _, state in seen]),
            ):
                axes.step(times, values, where="post", color=color, label=worker, linewidth=1.6)
        for axes, name_of in ((waiting, "waiting"), (running, "running"), (kv, "KV blocks in use")):
            axes.set_title(name_of)
        handles, labels = waiting.get_legend_handles_labels()
        legend = kv.legend(handles, labels, loc="upper left", bbox_to_anchor=(1.0, 1.0),
                           title=name, alignment="left")  # fmt: skip
        legend.get_title().set_fontweight("bold")
    for axes in grid[:, :2].flat:
        axes.set_ylabel("sequences")
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        axes.set_ylim(0, max(1.0, axes.get_ylim()[1]))
    for axes in grid[:, 2]:
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(
            PercentFormatter(1.0, decimals=0 if axes.get_ylim()[1] > 0.05 else 1)
        )
    for axes in grid[-1]:
        axes.set_xlim(0, duration_s)
        axes.set_xlabel("seconds")
    return figure


def _bars(axes: Axes, pool: PoolSpans, colors: dict[str, str]) -> None:
    for phase in Phase:
        for name, color in colors.items():
            spans = [s for s in pool.spans if s.phase is phase and s.length_class == name]
            axes.barh(
                [span.lane for span in spans],
                [span.end_s - span.start_s for span in spans],
                left=[span.start_s for span in spans],
                height=0.5 if pool.name == WAITING else 0.82,
                color=_TRANSFER_COLOR if phase is Phase.TRANSFER else color,
                alpha=_ALPHA[phase],
                edgecolor="white",  # parts two bars that follow each other
                linewidth=0.5 if phase in _LONG_PHASES else 0,
            )
    axes.grid(False, axis="y")
    axes.tick_params(axis="x", colors=MUTED)


def _class_legend(colors: dict[str, str]) -> list[Patch]:
    return [Patch(color=color, label=f"{name} prompt") for name, color in colors.items()]


def _phase_legend(phases: list[Phase]) -> list[Patch]:
    return [
        Patch(
            facecolor=_TRANSFER_COLOR if phase is Phase.TRANSFER else MUTED,
            alpha=_ALPHA[phase],
            linewidth=0,
            label=str(phase),
        )
        for phase in Phase
        if phase in phases
    ]


def _state(row: TimelineRow, worker: str) -> WorkerState | None:
    return next((state for state in row.workers if state.worker == worker), None)


def _kv_in_use(state: WorkerState) -> float:
    total = sum(state.kv_blocks.values())
    held = state.kv_blocks.get("used", 0.0) + state.kv_blocks.get("leased", 0.0)
    return held / total if total else 0.0
