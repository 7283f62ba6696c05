"""A measured figure beside the bound that the machine sets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from tandem_perf.machine import Machine
from tandem_perf.micro.timing import Spread


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """``value`` in the unit of its figure: a floor of a time, a ceiling of a rate."""

    value: float
    reason: str


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """``part`` is engine, transport, …; ``is_rate``: more is better. ``busy``: see ``Timing``."""

    part: str
    what: str
    unit: str
    spread: Spread
    bound: Bound
    busy: float
    is_rate: bool = False

    @property
    def best(self) -> float:
        """What noise was least part of."""
        return self.spread.max if self.is_rate else self.spread.min

    def times_bound(self, value: float) -> float:
        """How many times slower than the bound ``value`` is; 1 cannot be beaten."""
        return self.bound.value / value if self.is_rate else value / self.bound.value


class MicroReport(msgspec.Struct, frozen=True, kw_only=True):
    """What ``--out`` holds."""

    machine: Machine
    figures: list[Figure]


@dataclass(frozen=True)
class MicroOptions:
    """``threads``: of the engine and of what its bound is measured with."""

    model_dir: Path
    dtype: str
    threads: int
    repeats: int
