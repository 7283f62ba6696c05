"""Repeats of one piece of work, timed by the wall clock and by the CPU it took."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
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
    """``seconds`` of each repeat, at least one, and ``cpu_seconds`` of the measuring thread: what
    the work costs on a core, whoever else was on the machine.
    """

    seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...]

    @property
    def busy(self) -> float:
        """The share of the time in which the thread had a core."""
        return min(1.0, sum(self.cpu_seconds) / sum(self.seconds))

    @property
    def best_s(self) -> float:
        return min(self.seconds)

    @property
    def best_cpu_s(self) -> float:
        """For bounds: noise only adds to it."""
        return min(self.cpu_seconds)


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
    cpu_seconds: list[float] = []
    for _ in range(repeats + 1):
        if prepare is not None:
            prepare()
        cpu_start_s, start_s = cpu(), wall()
        for _ in range(loops):
            work()
        end_s, cpu_end_s = wall(), cpu()
        seconds.append((end_s - start_s) / loops)
        cpu_seconds.append((cpu_end_s - cpu_start_s) / loops)
    return Timing(tuple(seconds[1:]), tuple(cpu_seconds[1:]))


def spread(values: Iterable[float]) -> Spread:
    ordered = sorted(values)
    return Spread(
        median=statistics.median(ordered), min=ordered[0], max=ordered[-1], repeats=len(ordered)
    )
