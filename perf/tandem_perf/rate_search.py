"""The highest rate at which enough requests meet the SLOs: bracketing, then bisection.

Pure: it proposes rates and hears what came of them; somebody else runs the load.
"""

from __future__ import annotations

import math

import msgspec


class Trial(msgspec.Struct, frozen=True):
    """One short run: requests per second, and the share of requests that met every SLO."""

    rate: float
    attainment: float


class RateSearch:
    """Doubles (or halves) from ``start`` until one rate passes and one fails, then bisects on a
    logarithmic scale until they are within ``tolerance`` of each other.

    ::

        while (rate := search.next_rate()) is not None:
            search.add(Trial(rate, run(rate)))
        print(search.best)
    """

    def __init__(
        self,
        start: float,
        *,
        min_attainment: float = 0.9,
        tolerance: float = 0.1,
        min_rate: float = 0.05,
        max_rate: float = 10_000.0,
    ) -> None:
        assert min_rate <= start <= max_rate and tolerance > 0
        self.trials: list[Trial] = []
        self._start = start
        self._min_attainment = min_attainment
        self._tolerance = tolerance
        self._min_rate = min_rate
        self._max_rate = max_rate

    @property
    def best(self) -> float | None:
        """The highest rate that passed below every rate that failed; None if none did."""
        return max((rate for rate in self._passed if rate < self._failed), default=None)

    def passes(self, trial: Trial) -> bool:
        return trial.attainment >= self._min_attainment

    def add(self, trial: Trial) -> None:
        self.trials.append(trial)

    def next_rate(self) -> float | None:
        """None once the answer is known: to the tolerance, or beyond the bounds."""
        if not self.trials:
            return self._start
        best, failed = self.best, self._failed
        if best is None:
            return max(failed / 2, self._min_rate) if failed > self._min_rate else None
        if math.isinf(failed):
            return min(best * 2, self._max_rate) if best < self._max_rate else None
        if failed / best <= 1 + self._tolerance:
            return None
        return math.sqrt(failed * best)

    @property
    def _passed(self) -> list[float]:
        return [trial.rate for trial in self.trials if self.passes(trial)]

    @property
    def _failed(self) -> float:
        """The lowest rate that failed; inf if none did."""
        return min((t.rate for t in self.trials if not self.passes(t)), default=math.inf)
