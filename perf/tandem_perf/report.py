"""``tandem bench report``: one HTML file that needs nothing else, and its charts as PNG."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem_cli.errors import CliError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tandem_perf.html_parts import Html
    from tandem_perf.report_data import ReportData

REPORT = "report.html"
_PNG_DPI = 160
_STYLE = Path(__file__).with_name("report_style.css")


def report(
    folder: Annotated[Path, typer.Argument(help="Results of tandem bench or of compare.")],
) -> None:
    """Write report.html and PNG files into a folder of results."""
    print(write_report(folder))


def write_report(folder: Path) -> Path:
    """The path of the HTML file. Raises CliError without results or without matplotlib."""
    try:
        from tandem_perf.chart_style import chart_style
        from tandem_perf.report_data import read_report_data
    except ImportError as error:
        raise CliError(f"reports need matplotlib: pip install 'tandem-triton[bench]' ({error})") \
            from error  # fmt: skip
    data = read_report_data(folder)
    with chart_style():
        page = _page(data)
    path = folder / REPORT
    path.write_text(page)
    return path


def _page(data: ReportData) -> str:
    from tandem_perf.html_parts import Html, tag

    title = " vs ".join(data.deployments)
    head = tag(
        "head",
        Html('<meta charset="utf-8">'),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        tag("title", f"Tandem bench: {title}"),
        tag("style", Html(_STYLE.read_text())),
    )
    body = tag("body", tag("main", _header(data, title), *_sections(data)))
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _header(data: ReportData, title: str) -> Html:
    from tandem_perf.html_parts import Html, tag
    from tandem_perf.report_tables import headline_cards

    summary = data.first
    lead = tag(
        "p", tag("b", summary.workload), f" · {summary.arrivals} · {summary.requests_prepared} "
        f"requests a run · {data.num_rounds} round{'s' * (data.num_rounds > 1)} · "
        f"{summary.machine.cpu}, {summary.machine.cores} cores · {summary.started_at[:10]}",
        css="lead",
    )  # fmt: skip
    links = (tag("a", name, href=f"#{anchor}") for anchor, name in _CONTENTS.items())
    warnings = [tag("p", text, css="warning") for text in _warnings(data)]
    return Html(
        tag("header", tag("h1", title), lead, tag("nav", *links), *warnings) + headline_cards(data)
    )


_CONTENTS = {
    "comparison": "Comparison",
    "latency": "Latency",
    "classes": "Length classes",
    "rates": "Goodput against rate",
    "pools": "Timeline of the pools",
    "occupancy": "Queue and KV occupancy",
    "time": "Where the time goes",
    "errors": "Errors",
    "method": "Method",
    "machine": "Machine and versions",
}


def _sections(data: ReportData) -> Iterator[Html]:
    from tandem_perf import report_tables
    from tandem_perf.html_parts import section

    yield section(
        _CONTENTS["comparison"], report_tables.comparison_table(data), anchor="comparison",
        note=f"Median over rounds (lowest–highest). A ratio is to {data.deployments[0]} in the "
        "same round; ▲ better and ▼ worse in every round, no mark: rounds disagree or there was "
        "one only. Latencies count from when a request was due.",
    )  # fmt: skip
    yield section(
        _CONTENTS["latency"], *_latency_figures(data), anchor="latency",
        note="The further left a curve, the faster; dots are p50, p95 and p99. All rounds "
        "together, completed requests.",
    )  # fmt: skip
    yield section(
        _CONTENTS["classes"], report_tables.class_table(data), anchor="classes",
        note="Latencies in milliseconds, median over rounds; counts are sums of all rounds.",
    )  # fmt: skip
    yield section(_CONTENTS["rates"], *_rate_figures(data), anchor="rates")
    yield section(
        _CONTENTS["pools"], *_pool_figures(data), anchor="pools",
        note="A bar is one request in one place, in the first round. Prefill begins the server's "
        "prefill time before the first token arrived; the wait is all before that.",
    )  # fmt: skip
    yield section(_CONTENTS["occupancy"], *_occupancy_figures(data), anchor="occupancy",
                  note="First round; read from the server's metrics twice a second.")  # fmt: skip
    yield section(_CONTENTS["time"], *_time_figures(data), anchor="time")
    yield section(_CONTENTS["errors"], report_tables.error_table(data), anchor="errors")
    yield section(_CONTENTS["method"], report_tables.method_table(data), anchor="method",
                  note="Deployments run in turn (A B A B), each started fresh, one at a time, with "
                  "the same requests.")  # fmt: skip
    yield section(_CONTENTS["machine"], report_tables.machine_table(data), anchor="machine")


def _latency_figures(data: ReportData) -> Iterator[Html]:
    from tandem_perf.charts import latency_cdfs

    yield _drawn(data, latency_cdfs(data, [None]), "latency-cdf",
                 "Cumulative distribution of time to first token and of the gaps between tokens.")
    classes = data.length_classes
    if 1 < len(classes) <= 5:
        yield _drawn(data, latency_cdfs(data, classes), "latency-cdf-by-class",
                     "The same by length class of the prompt.")  # fmt: skip


def _rate_figures(data: ReportData) -> Iterator[Html]:
    from tandem_perf.charts import goodput_by_rate
    from tandem_perf.html_parts import tag

    if data.sweep:
        yield _drawn(data, goodput_by_rate(data), "goodput-by-rate",
                     "Completed requests per second that met every SLO, and their share.")
    else:
        yield tag("p", "No sweep of rates was recorded; compare --sweep 0.5,1,2 records one.",
                  css="note")  # fmt: skip


def _pool_figures(data: ReportData) -> Iterator[Html]:
    from tandem_perf.chart_pools import pool_timeline

    duration_s = _duration_s(data)
    for name, runs in data.runs.items():
        figure = pool_timeline(runs[0], name, data.length_classes, duration_s)
        if figure is not None:
            yield _drawn(data, figure, f"pools-{_slug(name)}", f"Requests in the pools of {name}.")


def _occupancy_figures(data: ReportData) -> Iterator[Html]:
    from tandem_perf.chart_pools import occupancy
    from tandem_perf.html_parts import tag

    figure = occupancy({name: runs[0] for name, runs in data.runs.items()}, _duration_s(data))
    if figure is None:
        yield tag("p", "No server gave metrics of its queues and KV cache.", css="note")
    else:
        yield _drawn(data, figure, "occupancy",
                     "Sequences that wait and run, and the share of KV blocks in use, by worker.")


def _time_figures(data: ReportData) -> Iterator[Html]:
    from tandem_perf.charts import where_time_goes

    yield _drawn(data, where_time_goes(data), "where-time-goes",
                 "CPU time of all server processes per output token that arrived, mean of rounds; "
                 "and the parts of the time to first token.")  # fmt: skip


def _drawn(data: ReportData, figure: Figure, name: str, caption: str) -> Html:
    """Writes the PNG file; the same picture as inline SVG."""
    from tandem_perf import html_parts

    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # everything has its place now; saving need not look again
    figure.savefig(data.folder / f"{name}.png", dpi=_PNG_DPI)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg "):], flags=re.DOTALL)
    return html_parts.figure(_unique_ids(svg, name), caption)


def _unique_ids(svg: str, name: str) -> str:
    """Ids of two inline pictures must differ."""
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'href="#', f'href="#{name}-', svg)
    return svg.replace("url(#", f"url(#{name}-")


def _warnings(data: ReportData) -> Iterator[str]:
    comparison = data.comparison
    if comparison and comparison.provenance.busy_warning:
        yield comparison.provenance.busy_warning
    if comparison and comparison.interrupted:
        yield "The comparison was stopped before its end."
    for fault in comparison.faults if comparison else ():
        yield f"{fault.deployment}, round {fault.round}, was not measured: {fault.message}"
    for name, runs in data.runs.items():
        failed = sum(run.summary.statistics.overall.failed for run in runs)
        if failed:
            yield f"{name}: {failed} requests failed; latencies are of the others only."
    if data.num_rounds == 1 and len(data.runs) > 1:
        yield "One round only: no difference can be told from chance."


def _duration_s(data: ReportData) -> float:
    return max(runs[0].summary.statistics.duration_s for runs in data.runs.values())


def _slug(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name)
