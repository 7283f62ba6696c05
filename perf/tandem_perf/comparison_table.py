"""A comparison as a table for the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from tandem_perf.comparison import Row, Spread, Verdict
from tandem_perf.comparison_result import ComparisonResult
from tandem_perf.summary import Summary

_COLORS = {Verdict.BETTER: "green", Verdict.WORSE: "red", Verdict.UNCLEAR: ""}
_MARKS = {Verdict.BETTER: "▲", Verdict.WORSE: "▼", Verdict.UNCLEAR: " "}


def print_comparison(result: ComparisonResult, console: Console) -> None:
    first, *others = result.deployments
    table = Table(title=f"each deployment against {first}", caption=_caption(result))
    table.add_column("")
    table.add_column("unit")
    table.add_column(first, justify="right")
    for name in others:
        table.add_column(name, justify="right")
        table.add_column("ratio", justify="right")
    section = ""
    for row in result.rows:
        if row.section != section:
            section = row.section
            table.add_section()
            table.add_row(f"[dim]{section}[/dim]")
        cells = [format_spread(row.values[first])]
        for name in others:
            cells += [format_spread(row.values[name]), _ratio_cell(row, name)]
        table.add_row(row.metric, row.unit, *cells)
    console.print(table)
    if warning := result.provenance.busy_warning:
        console.print(f"[yellow]warning:[/yellow] {warning}", highlight=False)
    for fault in result.faults:
        console.print(f"[red]not measured:[/red] {fault.deployment}, round {fault.round}: ", end="")
        console.print(fault.message, markup=False, highlight=False)


def run_line(summary: Summary, number: int, rounds: int) -> str:
    """One run; ``rounds`` is 0 for one of a sweep."""
    figures = summary.statistics
    latencies = figures.overall.latencies

    def ms(value: float | None) -> str:
        return "–" if value is None else f"{value * 1e3:,.0f} ms"

    where = f"round {number}/{rounds}" if rounds else summary.arrivals
    return (
        f"{summary.deployment} · {where} · {figures.requests_per_s:.2f} requests/s · "
        f"TTFT p50 {ms(latencies.ttft.p50)} · ITL p50 {ms(latencies.itl.p50)}, "
        f"p99 {ms(latencies.itl.p99)} · {figures.overall.failed} failed"
    )


def _caption(result: ComparisonResult) -> str:
    return (
        f"median of {result.rounds} rounds (lowest–highest); a ratio is within a round; "
        "▲ better, ▼ worse in every round"
    )


def _ratio_cell(row: Row, name: str) -> str:
    ratio = row.ratios[name]
    if ratio is None:
        return "–"
    verdict = row.verdict(name)
    text = f"×{format_spread(ratio)} {_MARKS[verdict]}"
    color = _COLORS[verdict]
    return f"[{color}]{text}[/{color}]" if color else text


def format_spread(value: Spread | None) -> str:
    """Median, then lowest and highest if there were several rounds."""
    if value is None:
        return "–"
    if value.count == 1:
        return format_number(value.median)
    low, high = format_number(value.low), format_number(value.high)
    return f"{format_number(value.median)} ({low}–{high})"


def format_number(value: float) -> str:
    """Three significant digits; no exponent."""
    size = abs(value)
    if size >= 100 or value == 0:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 1 else f"{value:.3f}"
