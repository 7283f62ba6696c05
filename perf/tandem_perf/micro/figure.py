"""A measured figure beside the bound that the machine sets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from tandem_perf.machine import Machine
from tandem_perf.micro.timing import Spread, Timing, spread


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """``value`` in the unit of its figure: a floor of a time, a ceiling of a rate."""

    value: float
    reason: str


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """``part`` is engine, transport, …; ``wall`` and ``cpu`` are the same quantity by two clocks
    (see ``Timing``). ``is_rate``: more is better.
    """

    part: str
    what: str
    unit: str
    wall: Spread
    cpu: Spread
    busy: float
    bound: Bound
    is_rate: bool = False

    def times_bound(self, value: float) -> float:
        """How many times slower than the bound ``value`` is; 1 cannot be beaten."""
        return self.bound.value / value if self.is_rate else value / self.bound.value


def time_figure(
    part: str, what: str, unit: str, timing: Timing, factor: float, bound: Bound
) -> Figure:
    """``factor``: 1e3 for milliseconds; divided by an amount of work, time per unit of it."""
    return Figure(
        part=part,
        what=what,
        unit=unit,
        wall=spread(s * factor for s in timing.seconds),
        cpu=spread(s * factor for s in timing.cpu_seconds),
        busy=timing.busy,
        bound=bound,
    )


def rate_figure(
    part: str, what: str, unit: str, timing: Timing, amount: float, bound: Bound
) -> Figure:
    """``amount`` of work per second."""
    return Figure(
        part=part,
        what=what,
        unit=unit,
        wall=spread(amount / s for s in timing.seconds),
        cpu=spread(amount / s for s in timing.cpu_seconds),
        busy=timing.busy,
        bound=bound,
        is_rate=True,
    )


class MicroReport(msgspec.Struct, frozen=True, kw_only=True):
    """What ``--out`` holds."""

    machine: Machine
    figures: list[Figure]


@dataclass(frozen=True)
class MicroOptions:
    """``threads``: of the engine and of what its bound is measured with. ``device``: of the engine,
    cpu or cuda; everything else is measured on the CPU.
    """

    model_dir: Path
    dtype: str
    threads: int
    repeats: int
    device: str = "cpu"
