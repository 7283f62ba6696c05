"""How all charts look: colours that colour-blind readers can tell apart, and the same type."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

INK, MUTED, GRID = "#1b2733", "#5b6b7a", "#dfe5ea"
# Okabe and Ito; deployments differ in line style as well, for print without colours.
DEPLOYMENT_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#7A6A00", "#56B4E9")
DEPLOYMENT_LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)))
CLASS_COLORS = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#D55E00")
PART_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999")

_STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": "#b8c3cc",
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.fonttype": "path",  # looks the same where the font is missing
    "svg.hashsalt": "tandem",  # the same data gives the same file
    "path.simplify": True,
}


@contextmanager
def chart_style() -> Iterator[None]:
    style: Any = {**_STYLE, "backend": "agg"}  # any: the stubs list every key as a literal
    with mpl.rc_context(style):
        yield


def line_of(number: int) -> dict[str, Any]:
    """Of the deployment with this number."""
    return {
        "color": DEPLOYMENT_COLORS[number % len(DEPLOYMENT_COLORS)],
        "linestyle": DEPLOYMENT_LINES[number % len(DEPLOYMENT_LINES)],
        "linewidth": 2.0,
    }


def class_colors(classes: list[str]) -> dict[str, str]:
    """Classes in the order of prompt lengths: short before long, "<=256" before "<=1k"."""
    return {name: CLASS_COLORS[n % len(CLASS_COLORS)] for n, name in enumerate(classes)}


def log_seconds(axes: Axes) -> None:
    """A logarithmic x axis of seconds, labelled 10 ms, 1 s, …"""
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _duration(value)))
    low, high = axes.get_xlim()
    if high / max(low, 1e-9) < 200:  # few decades: label the 2s and 5s, too
        axes.xaxis.set_minor_formatter(
            FuncFormatter(lambda value, _: _duration(value) if _leads_2_or_5(value) else "")
        )
        axes.tick_params(axis="x", which="minor", labelsize=8)
    else:
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(True, axis="x", which="minor", linewidth=0.4)


def _duration(seconds: float) -> str:
    if seconds >= 0.9995:
        return f"{seconds:g} s"
    return f"{seconds * 1e3:g} ms" if seconds >= 0.9995e-3 else f"{seconds * 1e6:g} µs"


def _leads_2_or_5(value: float) -> bool:
    return f"{value:e}"[0] in "25"
