"""Percentiles by linear interpolation, and the figures of one quantity.

Of n sorted values the percentile p is at position (n − 1) · p / 100, counted from 0; between two
values it is interpolated (numpy's default, Hyndman and Fan's type 7).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Of a quantity in seconds. None, not zero, where there are no values."""

    count: int = 0
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of sorted values, at least one."""
    assert ordered, "no values"
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def distribution(values: Iterable[float | None]) -> Distribution:
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return Distribution()
    return Distribution(
        count=len(ordered),
        mean=sum(ordered) / len(ordered),
        p50=percentile(ordered, 50),
        p90=percentile(ordered, 90),
        p95=percentile(ordered, 95),
        p99=percentile(ordered, 99),
        max=ordered[-1],
    )
