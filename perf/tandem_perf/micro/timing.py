"""Repeats of one piece of work, timed; median and range, and how noisy the machine was."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Of one quantity over its repeats."""

    median: float
    min: float
    max: float
    repeats: int


@dataclass(frozen=True)
class Timing:
    """``seconds`` of each repeat, at least one. ``busy``: the share of that time in which the
    measuring thread had a core; well below 1 the machine (or a wait) is part of the figure.
    """

    seconds: tuple[float, ...]
    busy: float

    @property
    def best_s(self) -> float:
        """What noise only adds to."""
        return min(self.seconds)

    def times(self, factor: float) -> Spread:
        """``factor`` 1e3 is milliseconds; divided by an amount of work it is time per unit."""
        return _spread([s * factor for s in self.seconds])

    def rate(self, amount: float) -> Spread:
        """``amount`` per second."""
        return _spread([amount / s for s in self.seconds])


def time_repeats(
    work: Callable[[], object],
    repeats: int,
    *,
    loops: int = 1,
    prepare: Callable[[], object] | None = None,
    wall: Callable[[], float] = time.perf_counter,
    cpu: Callable[[], float] = time.thread_time,
) -> Timing:
    """Times ``work`` after one warm-up; a repeat is the mean of ``loops`` calls.

    ``prepare`` runs before each repeat (and the warm-up) and is not timed.
    """
    assert repeats >= 1 and loops >= 1
    seconds: list[float] = []
    cpu_s = 0.0
    for repeat in range(repeats + 1):
        if prepare is not None:
            prepare()
        cpu_start_s, start_s = cpu(), wall()
        for _ in range(loops):
            work()
        end_s, cpu_end_s = wall(), cpu()
        if repeat > 0:
            seconds.append(end_s - start_s)
            cpu_s += cpu_end_s - cpu_start_s
    busy = min(1.0, cpu_s / sum(seconds)) if sum(seconds) > 0 else 1.0
    return Timing(tuple(s / loops for s in seconds), busy)


def _spread(values: list[float]) -> Spread:
    return Spread(
        median=statistics.median(values), min=min(values), max=max(values), repeats=len(values)
    )
