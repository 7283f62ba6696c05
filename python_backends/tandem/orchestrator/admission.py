"""Who starts next: the queue in front of both pools, its order and its bounds. No asyncio here but
in ``enter``, so that a test drives it with a clock of its own.

::

    arrive ──▶ accept ──▶ enter ──────────▶ started ──────────▶ leave
       waiting (bounded)    entering          decoding
                            prefill, hand-over: never more than decode can take

A request is refused at once or served in its turn; nothing that waits holds a block anywhere.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from tandem.config import OrchestratorSettings
from tandem.errors import Unavailable
from tandem.metrics import MetricsBuffer
from tandem.orchestrator.drain_rate import DrainRate
from tandem.types import Load, PriorityClass, Role

# The order of the queue is that of the engines' schedulers: shortest work first, with ageing.
_TOKENS_PER_S = 500.0  # so many prompt tokens more are worth a second of waiting
_PRIORITY_S = 10.0  # and so is a step of ``priority``
# So many may enter though decode is full: it has a successor as soon as a sequence ends.
_AHEAD = 4
_POLL_S = 0.02  # room at decode shows in its loads, which nobody announces
_MIN_RETRY_S, _MAX_RETRY_S = 0.5, 60.0


class _State(Enum):
    WAITING = auto()
    ENTERING = auto()
    STARTED = auto()
    LEFT = auto()


@dataclass(eq=False)
class Ticket:
    """One request, from its arrival to its end."""

    priority: int  # smaller is earlier; 0 is normal
    arrived_s: float
    num_tokens: int = 0  # of its prompt, once it is tokenized
    state: _State = _State.WAITING
    go: Callable[[], None] | None = None  # set while it may be let in

    @property
    def priority_class(self) -> PriorityClass:
        return PriorityClass.of(self.priority)

    @property
    def rank(self) -> float:
        """Smaller is earlier. Waiting needs no term: it passes for all alike."""
        return self.arrived_s + self.num_tokens / _TOKENS_PER_S + self.priority * _PRIORITY_S


@dataclass
class _Waiting:
    """What waits of one class."""

    num_requests: int = 0
    num_tokens: int = 0


@dataclass
class _Entering:
    """What has left the queue and does not decode yet."""

    num_requests: int = 0
    num_blocks: int = 0


@dataclass
class Admission:
    """Owned by the orchestrator's event loop. ``loads`` are the newest ones of all engines."""

    settings: OrchestratorSettings
    loads: Callable[[], Iterable[Load]]
    metrics: MetricsBuffer
    clock: Callable[[], float]
    _line: list[tuple[float, int, Ticket]] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _waiting: dict[PriorityClass, _Waiting] = field(
        default_factory=lambda: {each: _Waiting() for each in PriorityClass}
    )
    _entering: _Entering = field(default_factory=_Entering)
    _rate: DrainRate = field(default_factory=DrainRate)
    _is_polling: bool = False

    def arrive(self, priority: int) -> Ticket:
        """A place in the queue, to be given back with ``leave``; raises ``Unavailable`` if the
        queue of its class is full.
        """
        ticket = Ticket(priority, self.clock())
        waiting = self._waiting[ticket.priority_class]
        limit = self.settings.max_queued_requests
        if waiting.num_requests >= limit:
            raise self._refused(ticket, f"{limit} requests wait (max_queued_requests)")
        self._check_tokens(ticket, waiting)
        self._count(ticket, +1, 0)
        return ticket

    def accept(self, ticket: Ticket, num_tokens: int, left_s: float | None) -> None:
        """Its prompt has ``num_tokens``, and it must have started in ``left_s`` (None: no matter).
        Raises ``Unavailable`` if these are too many or the time will not do; whatever is accepted
        is not refused any more.
        """
        waiting = self._waiting[ticket.priority_class]
        self._check_tokens(ticket, waiting)
        expected_s = self._expected_wait_s(ticket)
        if left_s is not None and expected_s is not None and expected_s > left_s:
            raise self._refused(ticket, f"a wait of {expected_s:.1f} s is longer than its timeout")
        ticket.num_tokens = num_tokens
        self._count(ticket, 0, num_tokens)

    async def enter(self, ticket: Ticket) -> None:
        """Returns when it is this request's turn. A second attempt is let in as it arrived first:
        before all that arrived after it."""
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self.line_up(ticket, lambda: None if turn.done() else turn.set_result(None))
        if not turn.done() and not self._is_polling:
            self._is_polling = True
            loop.call_later(_POLL_S, self._poll, loop)
        await turn

    def line_up(self, ticket: Ticket, go: Callable[[], None]) -> None:
        """Calls ``go`` as soon as it is this request's turn, perhaps now."""
        if ticket.state is not _State.WAITING:  # another attempt
            self._give_back(ticket)
            ticket.state = _State.WAITING
            self._count(ticket, +1, ticket.num_tokens)
        ticket.go = go
        heapq.heappush(self._line, (ticket.rank, next(self._numbers), ticket))
        self.let_in()

    def started(self, ticket: Ticket) -> None:
        """Its tokens come from decode: what it needs there is in the loads from now on."""
        if ticket.state is _State.ENTERING:
            self._give_back(ticket)
            ticket.state = _State.STARTED
            self.let_in()

    def leave(self, ticket: Ticket) -> None:
        """The request has ended, in whatever state."""
        self._give_back(ticket)
        ticket.state, ticket.go = _State.LEFT, None
        self._forget_left()
        self.let_in()

    def let_in(self) -> None:
        """Lets in as many as decode can take, in their order; none overtakes the first."""
        while self._line:
            _, _, ticket = self._line[0]
            if ticket.state is _State.WAITING and not self._has_room(ticket):
                break
            heapq.heappop(self._line)
            if ticket.state is _State.WAITING and ticket.go is not None:
                self._let_in(ticket, ticket.go)
        self._rate.note_waiting(self.clock(), is_waiting=bool(self._line))

    def _forget_left(self) -> None:
        """Those that left while they waited, once they are most of the line."""
        if len(self._line) > 64 + 2 * sum(w.num_requests for w in self._waiting.values()):
            self._line = [entry for entry in self._line if entry[2].state is _State.WAITING]
            heapq.heapify(self._line)

    def _let_in(self, ticket: Ticket, go: Callable[[], None]) -> None:
        self._give_back(ticket)
        ticket.state = _State.ENTERING
        ticket.go = None
        self._entering.num_requests += 1
        self._entering.num_blocks += self._num_blocks(ticket)
        self._rate.count(ticket.num_tokens)
        self.metrics.observe("tandem_admission_seconds", self.clock() - ticket.arrived_s)
        go()

    def _has_room(self, ticket: Ticket) -> bool:
        entering = self._entering
        if entering.num_requests < _AHEAD:
            return True
        decode = [load for load in self.loads() if load.role is Role.DECODE]
        num_places = sum(load.max_num_seqs - load.num_running - load.num_waiting for load in decode)
        num_blocks = sum(load.num_free_blocks for load in decode)
        return (
            # Each pool takes so many calls; more would wait there, where no priority counts.
            entering.num_requests < 2 * self.settings.max_calls_in_flight
            and entering.num_requests < num_places
            and entering.num_blocks + self._num_blocks(ticket) <= num_blocks
        )

    def _num_blocks(self, ticket: Ticket) -> int:
        return ticket.num_tokens // self.settings.block_size + 1  # with its next token

    def _check_tokens(self, ticket: Ticket, waiting: _Waiting) -> None:
        """Whatever its own length: or else a queue that is full has room for short prompts only."""
        limit = self.settings.max_queued_tokens
        if waiting.num_tokens >= limit:
            reason = f"{waiting.num_tokens} of {limit} prompt tokens wait (max_queued_tokens)"
            raise self._refused(ticket, reason)

    def _expected_wait_s(self, ticket: Ticket) -> float | None:
        """Until a request that comes now would start; None if no queue has shown it yet."""
        before = (c for c in PriorityClass if c.order <= ticket.priority_class.order)
        return self._rate.seconds_for(sum(self._waiting[c].num_tokens for c in before))

    def _refused(self, ticket: Ticket, reason: str) -> Unavailable:
        expected_s = self._expected_wait_s(ticket) or 0.0
        retry_s = min(max(expected_s, _MIN_RETRY_S), _MAX_RETRY_S)
        return Unavailable(
            f"overloaded, {ticket.priority_class} priority: {reason}; retry after {retry_s:.1f} s"
        )

    def _give_back(self, ticket: Ticket) -> None:
        if ticket.state is _State.WAITING:
            self._count(ticket, -1, -ticket.num_tokens)
        elif ticket.state is _State.ENTERING:
            self._entering.num_requests -= 1
            self._entering.num_blocks -= self._num_blocks(ticket)

    def _count(self, ticket: Ticket, num_requests: int, num_tokens: int) -> None:
        name = ticket.priority_class
        waiting = self._waiting[name]
        waiting.num_requests += num_requests
        waiting.num_tokens += num_tokens
        self.metrics.set("tandem_queued_requests", waiting.num_requests, name)
        self.metrics.set("tandem_queued_tokens", waiting.num_tokens, name)

    def _poll(self, loop: asyncio.AbstractEventLoop) -> None:
        self.let_in()
        self._is_polling = bool(self._line)
        if self._is_polling:
            loop.call_later(_POLL_S, self._poll, loop)
