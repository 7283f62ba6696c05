"""The clock of one run."""

from __future__ import annotations

import time


class RunClock:
    """Seconds since the run started; monotonic, the same in every thread."""

    def __init__(self) -> None:
        self._started_s = time.perf_counter()

    def __call__(self) -> float:
        return time.perf_counter() - self._started_s
