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
    caption = "median (min–max); × is median (best) against bound"
    table = Table(title=figures[0].part, caption=caption)
    table.add_column("what", overflow="fold")
    for title in ("unit", "measured", "bound", "×", "bound is"):
        table.add_column(title, justify="left" if title == "bound is" else "right")
    for figure in figures:
        table.add_row(
            figure.what,
            figure.unit,
            _spread(figure.spread),
            _number(figure.bound.value),
            f"{_times(figure, figure.spread.median)} ({_times(figure, figure.best)})",
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
            f"{after.load_average[0]:.1f} after on {before.cores} cores; trust the best value"
        )
    for figure in figures:
        if figure.busy < _BUSY:
            yield f"{figure.part}, {figure.what}: had a core {figure.busy:.0%} of the time"


def _times(figure: Figure, value: float) -> str:
    return f"{figure.times_bound(value):.1f}"


def _spread(spread: Spread) -> str:
    return f"{_number(spread.median)} ({_number(spread.min)}–{_number(spread.max)})"


def _number(value: float) -> str:
    """Three digits, and thousands with a comma."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
