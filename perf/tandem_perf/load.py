"""Sends sessions to a target when they are due, and makes a record of every request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass

from tandem_perf.records import Outcome, RequestRecord
from tandem_perf.requests import BenchRequest, Session
from tandem_perf.targets.base import Answer, Target, TargetError
from tandem_perf.token_arrivals import TokenArrivals

_YIELD_EVERY = 16  # sends that are overdue, before streams get their turn
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """``duration_s``: nothing is sent later; what is in flight then may finish. ``timeout_s``:
    from sending a request to its last response. ``max_in_flight`` protects this machine: a
    request beyond it is recorded as an error, not delayed.
    """

    deployment: str
    workload: str
    timeout_s: float = 600.0
    duration_s: float = float("inf")
    max_in_flight: int = 10_000


@dataclass
class Counts:
    """What a progress bar shows."""

    in_flight: int = 0
    finished: int = 0
    failed: int = 0
    tokens: int = 0


class Load:
    """One run. Belongs to one event loop; ``on_record`` hears of each request as it ends."""

    def __init__(
        self,
        target: Target,
        options: LoadOptions,
        clock: Callable[[], float],
        on_record: Callable[[RequestRecord], None],
    ) -> None:
        self.counts = Counts()
        self.was_stopped = False
        self._target = target
        self._options = options
        self._clock = clock
        self._on_record = on_record
        self._runner: asyncio.Task[None] | None = None

    async def run_open(self, schedule: Iterable[tuple[float, Session]]) -> None:
        """Starts every session at its time, however many are still running; returns when all
        requests have ended, or soon after ``stop``.
        """
        await self._run(self._dispatch(schedule))

    async def run_closed(self, sessions: Iterable[Session], concurrency: int) -> None:
        """``concurrency`` users take sessions one by one."""
        await self._run(self._users(iter(sessions), concurrency))

    def stop(self) -> None:
        """Cancels what is in flight. Each of these requests still gets its record."""
        self.was_stopped = True
        if self._runner is not None:
            self._runner.cancel()

    async def _run(self, work: Awaitable[None]) -> None:
        self._runner = asyncio.ensure_future(work)
        try:
            await self._runner
        except asyncio.CancelledError:
            if not self.was_stopped:  # somebody cancelled us, not the load
                raise

    async def _dispatch(self, schedule: Iterable[tuple[float, Session]]) -> None:
        async with asyncio.TaskGroup() as running:
            for number, (at_s, session) in enumerate(schedule):
                if at_s >= self._options.duration_s:
                    break
                if at_s > self._clock() or number % _YIELD_EVERY == 0:
                    await asyncio.sleep(max(0.0, at_s - self._clock()))
                running.create_task(self._session(session, at_s))

    async def _users(self, sessions: Iterator[Session], concurrency: int) -> None:
        async with asyncio.TaskGroup() as users:
            for _ in range(concurrency):
                users.create_task(self._user(sessions))

    async def _user(self, sessions: Iterator[Session]) -> None:
        for session in sessions:
            now_s = self._clock()
            if now_s >= self._options.duration_s:
                return
            await self._session(session, now_s)

    async def _session(self, session: Session, at_s: float) -> None:
        due_s = at_s
        for request, think_s in zip(session.requests, session.think_times_s, strict=False):
            if think_s:
                due_s += think_s
                await asyncio.sleep(max(0.0, due_s - self._clock()))
            if due_s >= self._options.duration_s:
                return
            record = await self._request(request, due_s)
            due_s = record.ended_s

    async def _request(self, request: BenchRequest, scheduled_s: float) -> RequestRecord:
        """Never raises but when it is cancelled; the record is given to ``on_record`` first."""
        tokens = TokenArrivals(self._clock, self._count_tokens)
        answer, sent_s = Answer(), None
        outcome, error = Outcome.CANCELLED, "the run was stopped"
        in_flight = self.counts.in_flight
        self.counts.in_flight += 1
        try:
            if in_flight >= self._options.max_in_flight:
                raise TargetError(f"not sent: {in_flight} requests were in flight")
            sent_s = self._clock()
            async with asyncio.timeout(self._options.timeout_s):
                answer = await self._target.send(request, tokens.add)
            outcome, error = Outcome.OK, ""
        except TimeoutError:
            outcome = Outcome.TIMEOUT
            error = f"no final response within {self._options.timeout_s:g} s"
        except TargetError as failure:
            outcome, error = Outcome.ERROR, str(failure)
        except Exception as failure:
            _log.exception("request %s", request.request_id)
            outcome, error = Outcome.ERROR, f"{type(failure).__name__}: {failure}"
        finally:
            # In finally, for a request that was cancelled as well.
            self.counts.in_flight -= 1
            self.counts.finished += 1
            self.counts.failed += outcome is not Outcome.OK
            record = self._record(request, scheduled_s, sent_s, outcome, error, tokens, answer)
            self._on_record(record)
        return record

    def _record(
        self,
        request: BenchRequest,
        scheduled_s: float,
        sent_s: float | None,
        outcome: Outcome,
        error: str,
        tokens: TokenArrivals,
        answer: Answer,
    ) -> RequestRecord:
        num_arrived = len(tokens.times_s)
        output_tokens = num_arrived if answer.output_tokens is None else answer.output_tokens
        return RequestRecord(
            request_id=request.request_id,
            deployment=self._options.deployment,
            workload=self._options.workload,
            length_class=request.length_class,
            scheduled_s=scheduled_s,
            sent_s=sent_s,
            first_token_s=tokens.times_s[0] if tokens.times_s else None,
            last_token_s=tokens.times_s[-1] if tokens.times_s else None,
            ended_s=self._clock(),
            token_times_s=tuple(tokens.times_s),
            has_chunks=tokens.has_chunks or output_tokens != num_arrived,
            prompt_tokens=answer.prompt_tokens or request.prompt_tokens,
            output_tokens=output_tokens,
            max_tokens=request.max_tokens,
            outcome=outcome,
            error=error,
            finish_reason=answer.finish_reason,
            server=answer.timings,
        )

    def _count_tokens(self, num_tokens: int) -> None:
        self.counts.tokens += num_tokens
