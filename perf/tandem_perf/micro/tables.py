"""Figures as tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from tandem_perf.machine import Machine
from tandem_perf.micro.figure import Figure
from tandem_perf.micro.timing import Spread

_BUSY = 0.9  # below, more than a tenth of the time went to somebody else


def print_part(figures: Sequence[Figure], console: Console) -> None:
    caption = "median (min–max), by wall clock and by CPU time; × is the median against the bound"
    table = Table(title=figures[0].part, caption=caption)
    table.add_column("what", overflow="fold")
    for title in ("unit", "wall", "×", "CPU", "×", "bound"):
        table.add_column(title, justify="right")
    table.add_column("bound by")
    for figure in figures:
        table.add_row(
            figure.what,
            figure.unit,
            *_cells(figure, figure.wall),
            *_cells(figure, figure.cpu),
            _number(figure.bound.value),
            figure.bound.reason,
        )
    console.print(table)


def print_noise(
    before: Machine, after: Machine, figures: Sequence[Figure], console: Console
) -> None:
    for warning in noise_warnings(before, after, figures):
        console.print(f"[yellow]warning:[/yellow] {warning}", highlight=False)


def noise_warnings(
    before: Machine, after: Machine, figures: Sequence[Figure]
) -> Iterator[str]:
    """What else ran on the machine, as far as it can be seen from here."""
    load = max(before.load_average[0], after.load_average[0])
    if load > before.cores:
        yield (
            f"noisy machine: load average {before.load_average[0]:.1f} before and "
            f"{after.load_average[0]:.1f} after on {before.cores} cores; trust the CPU time"
        )
    for part in dict.fromkeys(figure.part for figure in figures):
        least = min(figure.busy for figure in figures if figure.part == part)
        if least < _BUSY:
            yield f"{part}: had a core only {least:.0%} of the time in at least one measurement"


def _cells(figure: Figure, spread: Spread) -> tuple[str, str]:
    values = f"{_number(spread.median)} ({_number(spread.min)}–{_number(spread.max)})"
    return values, f"{figure.times_bound(spread.median):.1f}"


def _number(value: float) -> str:
    """Three digits, and thousands with a comma."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
