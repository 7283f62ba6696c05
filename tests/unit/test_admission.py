"""The queue in front of the pools, on a clock that only the tests move."""

from __future__ import annotations

import asyncio
import gc
import heapq
import random
import weakref

import pytest

from tandem.config import OrchestratorSettings
from tandem.errors import Unavailable
from tandem.metrics import Key, MetricsBuffer
from tandem.orchestrator.admission import Admission, Ticket
from tandem.orchestrator.drain_rate import DrainRate
from tandem.types import Load, PriorityClass, Role

AHEAD = 4  # requests that may enter though decode is full


class Queue:
    """An admission in front of one decode engine, whose load the test sets."""

    def __init__(self, num_places: int = 0, num_free_blocks: int = 10_000, **settings: int) -> None:
        self.now_s = 100.0
        self.num_places = num_places
        self.num_free_blocks = num_free_blocks
        self.metrics = MetricsBuffer()
        self.admission = Admission(
            OrchestratorSettings(**settings), self.loads, self.metrics, lambda: self.now_s
        )
        self.let_in: list[Ticket] = []

    def loads(self) -> list[Load]:
        return [
            Load(role=Role.PREFILL, num_free_blocks=9, max_num_seqs=9),
            Load(
                role=Role.DECODE,
                num_running=3,
                num_waiting=2,
                max_num_seqs=5 + self.num_places,
                num_free_blocks=self.num_free_blocks,
            ),
        ]

    def come(
        self, num_tokens: int = 10, *, priority: int = 0, left_s: float | None = None
    ) -> Ticket:
        ticket = self.admission.arrive(priority)
        try:
            self.admission.accept(ticket, num_tokens, left_s)
        except Unavailable:
            self.admission.leave(ticket)
            raise
        self.line_up(ticket)
        return ticket

    def line_up(self, ticket: Ticket) -> None:
        self.admission.line_up(ticket, lambda: self.let_in.append(ticket))

    def fill(self) -> None:
        """Nobody who comes now may enter at once."""
        for _ in range(AHEAD):
            self.come()
        assert len(self.let_in) == AHEAD
        self.let_in.clear()
        self.num_places = 0

    def open(self, num_places: int = AHEAD + 1) -> list[Ticket]:
        """Decode has room for one more request after the other; the order in which they enter."""
        self.num_places = num_places
        self.let_in.clear()
        self.admission.let_in()
        while len(self.let_in) > sum(t.state.name != "ENTERING" for t in self.let_in):
            self.admission.started(next(t for t in self.let_in if t.state.name == "ENTERING"))
        return self.let_in

    def waiting(self, priority_class: PriorityClass = PriorityClass.NORMAL) -> tuple[float, float]:
        gauges = self.metrics.drain()[1]
        return (
            gauges.get(Key("tandem_queued_requests", priority_class), 0),
            gauges.get(Key("tandem_queued_tokens", priority_class), 0),
        )


# ---- room ------------------------------------------------------------------------------------


def test_a_request_enters_at_once_where_there_is_room() -> None:
    queue = Queue(num_places=50)
    tickets = [queue.come() for _ in range(20)]
    assert queue.let_in == tickets
    assert queue.waiting() == (0, 0)


def test_only_a_few_enter_ahead_of_what_decode_can_take() -> None:
    queue = Queue(num_places=0)
    tickets = [queue.come() for _ in range(10)]
    assert queue.let_in == tickets[:AHEAD]
    assert queue.waiting() == (6, 60)
    queue.admission.started(tickets[0])
    assert queue.let_in == tickets[: AHEAD + 1]


def test_every_place_at_decode_lets_one_in() -> None:
    queue = Queue(num_places=7)
    for _ in range(20):
        queue.come()
    assert len(queue.let_in) == 7


def test_blocks_at_decode_bound_what_enters() -> None:
    queue = Queue(num_places=100, num_free_blocks=30)
    for _ in range(20):
        queue.come(16 * 4 - 1)  # four blocks, with the next token
    assert len(queue.let_in) == 7
    queue.num_free_blocks = 40
    queue.admission.let_in()
    assert len(queue.let_in) == 10


def test_a_large_request_is_not_overtaken_for_ever() -> None:
    queue = Queue(num_places=100, num_free_blocks=30)
    for _ in range(6):
        queue.come(63)
    large, small = queue.come(400), queue.come(400)
    assert large not in queue.let_in and small not in queue.let_in
    queue.num_free_blocks = 200
    queue.admission.let_in()
    assert queue.let_in[-2:] == [large, small]


def test_no_more_enter_than_the_pools_take_calls() -> None:
    queue = Queue(num_places=100, max_calls_in_flight=3)
    for _ in range(20):
        queue.come()
    assert len(queue.let_in) == 6


def test_an_end_in_any_state_gives_back_what_it_took() -> None:
    queue = Queue(num_places=0)
    tickets = [queue.come() for _ in range(AHEAD + 3)]
    entering, waiting = tickets[0], tickets[AHEAD]
    queue.admission.leave(waiting)
    assert queue.waiting() == (2, 20)
    queue.admission.leave(entering)
    queue.admission.leave(entering)
    assert queue.let_in[-1] is tickets[AHEAD + 1]
    for ticket in tickets:
        queue.admission.leave(ticket)
    assert queue.waiting() == (0, 0)
    queue.let_in.clear()
    queue.fill()


# ---- order -----------------------------------------------------------------------------------


def test_first_come_first_served_among_equals() -> None:
    queue = Queue()
    queue.fill()
    tickets = []
    for _ in range(5):
        queue.now_s += 0.01
        tickets.append(queue.come())
    assert queue.open() == tickets


def test_a_smaller_priority_is_earlier() -> None:
    queue = Queue()
    queue.fill()
    low, normal, high, higher = (queue.come(priority=p) for p in (3, 0, -1, -2))
    assert queue.open() == [higher, high, normal, low]


def test_ten_seconds_of_waiting_are_worth_a_step_of_priority() -> None:
    queue = Queue()
    queue.fill()
    low = queue.come(priority=1)
    queue.now_s += 9.9
    early = queue.come()
    queue.now_s += 0.2
    late = queue.come()
    assert queue.open() == [early, low, late]


def test_a_long_prompt_lets_short_ones_pass_for_a_while() -> None:
    queue = Queue()
    queue.fill()
    long = queue.come(1000)  # as if it came 2 s later
    queue.now_s += 1.9
    early = queue.come(1)
    queue.now_s += 0.2
    late = queue.come(1)
    assert queue.open() == [early, long, late]


def test_another_attempt_goes_before_those_that_came_later() -> None:
    queue = Queue()
    (first, *_) = [queue.come() for _ in range(AHEAD)]
    queue.admission.started(first)
    queue.come()
    queue.now_s += 1
    later = queue.come()
    queue.line_up(first)
    assert queue.let_in[-1] is not first
    assert queue.open() == [first, later]


# ---- bounds ----------------------------------------------------------------------------------


def test_a_class_has_a_budget_of_requests() -> None:
    queue = Queue(max_queued_requests=2)
    queue.fill()
    queue.come(), queue.come()
    with pytest.raises(Unavailable, match=r"normal priority: 2 requests wait .*; retry after"):
        queue.come()
    queue.come(priority=-1)
    assert queue.waiting(PriorityClass.HIGH) == (1, 10)


def test_a_class_has_a_budget_of_prompt_tokens() -> None:
    queue = Queue(max_queued_tokens=100)
    queue.fill()
    queue.come(60, priority=1)
    tokenizing = queue.admission.arrive(2)
    queue.come(50, priority=2)
    with pytest.raises(Unavailable, match="low priority: 110 of 100 prompt tokens wait"):
        queue.admission.accept(tokenizing, 1, None)
    with pytest.raises(Unavailable):
        queue.admission.arrive(1)  # before it is tokenized
    queue.admission.leave(tokenizing)
    assert queue.waiting(PriorityClass.LOW) == (2, 110)
    queue.come(60)
    assert queue.waiting() == (1, 60)


def test_a_queue_that_has_room_takes_a_prompt_of_any_length() -> None:
    """Short prompts would fill the last room of a full queue for ever, and long ones never fit."""
    queue = Queue(max_queued_tokens=100)
    queue.fill()
    queue.come(99)
    queue.come(5000)
    assert queue.waiting() == (2, 5099)
    with pytest.raises(Unavailable):
        queue.come(1)


def _drain(queue: Queue, seconds: int, tokens_per_s: int) -> None:
    """Full all the time: one request of ``tokens_per_s`` enters each second."""
    for _ in range(seconds):
        queue.now_s += 1
        queue.come(tokens_per_s)
        queue.admission.started(next(t for t in queue.let_in if t.state.name == "ENTERING"))


def test_a_request_that_would_wait_longer_than_its_timeout_is_refused_at_once() -> None:
    queue = Queue()
    for _ in range(AHEAD + 20):
        queue.come(100)
    queue.come(100, left_s=0.001)  # nothing is known yet
    _drain(queue, 10, 100)
    assert queue.waiting() == (21, 2100)
    with pytest.raises(
        Unavailable, match=r"a wait of 2\d\.\d s is longer than its timeout.* 2\d\.\d s"
    ):
        queue.come(100, left_s=20)
    queue.come(100, left_s=30)
    queue.come(100, priority=-1, left_s=1)  # the others wait behind it


def test_an_idle_server_says_nothing_about_its_rate() -> None:
    rate = DrainRate()
    for second in range(20):
        rate.count(1)
        rate.note_waiting(second, is_waiting=False)
    assert rate.seconds_for(1000) is None and rate.seconds_for(0) == 0
    for second in range(20, 30):
        rate.note_waiting(second, is_waiting=True)
        rate.count(50)
    assert rate.seconds_for(1000) == pytest.approx(20)


# ---- overload --------------------------------------------------------------------------------


def test_ten_times_the_load_is_served_at_capacity_and_forgotten_at_once() -> None:
    """A pool that serves 10 requests/s with 8 places; 100 requests/s arrive for 60 s."""
    queue = Queue(num_places=8, max_queued_tokens=1000)
    service_s, num_places = 0.8, 8
    draw = random.Random(1)
    running: list[tuple[float, int, Ticket]] = []
    done: list[tuple[float, Ticket]] = []
    num_refused = most_waiting = numbers = 0
    next_arrival_s, end_s = queue.now_s, queue.now_s + 60
    num_seen = 0
    while queue.now_s < end_s or running:
        if next_arrival_s < end_s and (not running or next_arrival_s < running[0][0]):
            queue.now_s = next_arrival_s
            next_arrival_s += draw.expovariate(100)
            try:
                queue.come(draw.choice((50, 150)))
            except Unavailable:
                num_refused += 1
        else:
            queue.now_s, _, ticket = heapq.heappop(running)
            queue.admission.leave(ticket)
            done.append((queue.now_s, ticket))
        # Decode takes up to so many; what is entering has no place there yet.
        while num_seen < len(queue.let_in) and len(running) < num_places:
            ticket = queue.let_in[num_seen]
            num_seen += 1
            numbers += 1
            heapq.heappush(running, (queue.now_s + service_s, numbers, ticket))
            queue.num_places = num_places - len(running)
            queue.admission.started(ticket)
        queue.num_places = num_places - len(running)
        queue.admission.let_in()
        waiting = queue.waiting()
        most_waiting = max(most_waiting, int(waiting[1]))
    in_time = [finish_s for finish_s, _ in done if finish_s < end_s]
    assert len(in_time) >= 0.97 * 60 * num_places / service_s
    assert most_waiting < 1000 + 150
    assert num_refused > 5 * len(done)
    assert max(finish_s - ticket.arrived_s for finish_s, ticket in done) < 30, "bounded wait"
    assert queue.come() is queue.let_in[-1], "at once"


def test_what_left_while_it_waited_is_not_kept() -> None:
    queue = Queue()
    queue.fill()
    queue.come()
    references = [weakref.ref(queue.come(priority=100)) for _ in range(1000)]
    for reference in references:
        ticket = reference()
        assert ticket is not None
        queue.admission.leave(ticket)
    del ticket
    gc.collect()
    assert sum(reference() is not None for reference in references) < 100


# ---- with asyncio ----------------------------------------------------------------------------


async def test_enter_waits_for_room_that_nobody_announces() -> None:
    queue = Queue()
    tickets = [queue.come() for _ in range(AHEAD)]
    assert len(tickets) == AHEAD
    late = queue.admission.arrive(0)
    queue.admission.accept(late, 10, None)
    entering = asyncio.create_task(queue.admission.enter(late))
    await asyncio.sleep(0)
    assert not entering.done()
    queue.num_places = AHEAD + 1
    await asyncio.wait_for(entering, 5)


async def test_a_cancelled_wait_takes_no_place() -> None:
    queue = Queue()
    tickets = [queue.come() for _ in range(AHEAD)]
    gone, next_one = queue.admission.arrive(0), queue.admission.arrive(0)
    waits = [asyncio.create_task(queue.admission.enter(ticket)) for ticket in (gone, next_one)]
    await asyncio.sleep(0)
    waits[0].cancel()
    await asyncio.gather(waits[0], return_exceptions=True)
    queue.admission.leave(gone)
    queue.admission.leave(tickets[0])
    await asyncio.wait_for(waits[1], 5)
