"""When sessions start: open loop (at given times, whatever the server does) or closed loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from tandem_perf.requests import Session
from tandem_perf.workloads.base import WorkloadError, generator

_ARRIVAL_STREAM = 0xA221  # arrivals and prompts of one seed are independent


class OpenLoop(Protocol):
    """Pairs each session with its start in seconds; known before the run, so never late."""

    def schedule(self, sessions: Iterable[Session], seed: int) -> Iterator[tuple[float, Session]]:
        ...


@dataclass(frozen=True)
class PoissonArrivals:
    rate: float  # sessions per second

    def schedule(self, sessions: Iterable[Session], seed: int) -> Iterator[tuple[float, Session]]:
        rng = generator(seed, _ARRIVAL_STREAM)
        at_s = 0.0
        for session in sessions:
            at_s += rng.exponential(1 / self.rate)
            yield at_s, session


@dataclass(frozen=True)
class ConstantArrivals:
    rate: float

    def schedule(self, sessions: Iterable[Session], seed: int) -> Iterator[tuple[float, Session]]:
        for number, session in enumerate(sessions):
            yield number / self.rate, session


@dataclass(frozen=True)
class TraceArrivals:
    """As the workload says; its times count from its first request."""

    def schedule(self, sessions: Iterable[Session], seed: int) -> Iterator[tuple[float, Session]]:
        timed = [(self._start(session), session) for session in sessions]
        timed.sort(key=lambda pair: pair[0])
        for at_s, session in timed:
            yield at_s - timed[0][0], session

    def _start(self, session: Session) -> float:
        if session.at_s is None:
            raise WorkloadError("this workload has no arrival times; give a rate or concurrency")
        return session.at_s


@dataclass(frozen=True)
class ClosedLoop:
    """``concurrency`` users: each starts a session when its earlier one has ended.

    A slow server slows this load down, so it hides queueing; use it to find capacity.
    """

    concurrency: int


Arrivals = PoissonArrivals | ConstantArrivals | TraceArrivals | ClosedLoop


def describe(arrivals: Arrivals) -> str:
    if isinstance(arrivals, ClosedLoop):
        return f"concurrency {arrivals.concurrency}"
    if isinstance(arrivals, TraceArrivals):
        return "trace"
    kind = "poisson" if isinstance(arrivals, PoissonArrivals) else "constant"
    return f"{kind} {arrivals.rate:g}/s"
