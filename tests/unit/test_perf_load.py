"""The load: what it sends when, what it records, and how it ends."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterable

import pytest

from tandem_perf.arrivals import ConstantArrivals
from tandem_perf.load import Load, LoadOptions
from tandem_perf.records import Outcome, RequestRecord
from tandem_perf.requests import BenchRequest, Session, single
from tandem_perf.run_clock import RunClock
from tandem_perf.slo import Slo, parse_slo
from tandem_perf.statistics import Statistics, statistics_of
from tandem_perf.targets.base import Answer, OnTokens, TargetOptions
from tandem_perf.targets.openai import OpenAITarget
from test_perf_targets import FakeOpenAI

SERVICE_S = 0.02
PATIENCE_S = 30.0  # only a failing test waits this long; a busy machine may stall for seconds


def sessions(count: int, first_id: int = 0, max_tokens: int = 1) -> list[Session]:
    """``first_id``: with it a FakeOpenAI finds its fault."""
    return [
        single(
            BenchRequest(
                request_id=str(number),
                length_class="short",
                max_tokens=max_tokens,
                input_ids=array("i", [first_id, number]),
                prompt_tokens=2,
            )
        )
        for number in range(count)
    ]


class Sender:
    """A load against a FakeOpenAI, and its records."""

    def __init__(self, server: FakeOpenAI, timeout_s: float = PATIENCE_S, **options: float) -> None:
        self.records: list[RequestRecord] = []
        self.target = OpenAITarget(TargetOptions(url=server.url, model="m"))
        load_options = LoadOptions(
            deployment="d",
            workload="w",
            timeout_s=timeout_s,
            **options,  # type: ignore[arg-type]
        )
        self.load = Load(self.target, load_options, RunClock(), self.records.append)

    async def open(self, what: Iterable[Session], rate: float) -> Statistics:
        await self.load.run_open(list(ConstantArrivals(rate).schedule(what, 0)))
        return await self._end()

    async def closed(self, what: Iterable[Session], concurrency: int) -> Statistics:
        await self.load.run_closed(what, concurrency)
        return await self._end()

    async def _end(self) -> Statistics:
        await self.target.aclose()
        return statistics_of(self.records, Slo())


async def test_open_loop_shows_the_queueing_that_closed_loop_hides() -> None:
    """A server of one request at a time, 20 ms each, so 50/s; offered 100/s for 24 requests."""
    async with FakeOpenAI(first_s=SERVICE_S, one_at_a_time=True).serve() as server:
        closed = await Sender(server).closed(sessions(24), concurrency=1)
        open_ = await Sender(server).open(sessions(24), rate=100.0)
    closed_ttft, open_ttft = closed.overall.latencies.ttft, open_.overall.latencies.ttft
    assert closed.overall.completed == open_.overall.completed == 24
    assert closed_ttft.p50 is not None
    assert open_ttft.p50 is not None and open_ttft.p99 is not None
    # Request k is due at 10·k ms and served until 20·(k + 1) ms: it waits 10·k ms, or longer on
    # a busy machine.
    assert open_ttft.p50 > SERVICE_S + 0.010 * 11.5 - 0.01
    assert open_ttft.p99 > SERVICE_S + 0.010 * 22.8 - 0.01
    assert open_ttft.p50 > 2 * closed_ttft.p50


async def test_open_loop_is_not_slowed_by_a_slow_server() -> None:
    """The server answers nobody before all thirty requests are there."""
    server = FakeOpenAI(gate=asyncio.Event())
    assert server.gate is not None
    async with server.serve():
        sender = Sender(server)
        running = asyncio.create_task(sender.open(sessions(30), rate=300.0))
        await _until(lambda: server.num_streams == 30)
        server.gate.set()
        result = await running
    assert result.overall.completed == 30
    scheduled = sorted(record.scheduled_s for record in sender.records)
    assert scheduled == pytest.approx([number / 300 for number in range(30)])


async def test_closed_loop_keeps_its_concurrency() -> None:
    async with FakeOpenAI(first_s=0.01).serve() as server:
        result = await Sender(server).closed(sessions(12), concurrency=3)
    assert server.most_streams == 3
    assert result.overall.completed == 12


async def test_known_delays_are_measured() -> None:
    async with FakeOpenAI(first_s=0.05, gap_s=0.02).serve() as server:
        sender = Sender(server)
        result = await sender.closed(sessions(3, max_tokens=5), concurrency=3)
    latencies = result.overall.latencies
    assert latencies.itl.count == 12
    measured_and_true = [
        (latencies.ttft.p50, 0.05),
        (latencies.itl.p50, 0.02),
        (latencies.tpot.p50, 0.02),
        (latencies.e2e.p50, 0.05 + 4 * 0.02),
    ]
    for measured, true in measured_and_true:  # never less; more on a busy machine
        assert measured is not None
        assert true - 0.003 < measured < true + 1.0
    record = sender.records[0]
    assert record.output_tokens == len(record.token_times_s) == 5
    assert record.prompt_tokens == 2
    assert record.finish_reason == "length"
    assert not record.has_chunks


async def test_chunks_are_flagged() -> None:
    async with FakeOpenAI(tokens_per_chunk=4, gap_s=0.01).serve() as server:
        sender = Sender(server)
        result = await sender.closed(sessions(1, max_tokens=8), concurrency=1)
    (record,) = sender.records
    assert record.has_chunks
    assert len(record.token_times_s) == 8
    assert len(record.gaps_s) == 1
    assert result.with_chunks == 1


async def test_errors_and_hangs_are_recorded_beside_what_works() -> None:
    mixed = [*sessions(4), *sessions(3, 901), *sessions(2, 902), *sessions(1, 903, max_tokens=2)]
    faults = {901: "refuse", 902: "hang", 903: "error"}
    async with FakeOpenAI(faults=faults).serve() as server:
        sender = Sender(server, timeout_s=2.0)
        result = await sender.open(mixed, rate=1000.0)
        await _until(lambda: server.left_early == 2)  # its connection is closed at the deadline
    assert (result.overall.completed, result.overall.failed) == (4, 6)
    assert result.errors == {
        "error: HTTP 503: overloaded": 3,
        "timeout: no final response within 2 s": 2,
        "error: engine died": 1,
    }
    assert result.overall.latencies.e2e.count == 4
    assert len(sender.records) == len(mixed)


async def test_a_target_that_is_gone_fails_every_request() -> None:
    server = FakeOpenAI(url="http://127.0.0.1:9")
    result = await Sender(server).open(sessions(3), rate=1000.0)
    assert result.overall.failed == 3
    assert result.overall.completed == 0
    (message,) = result.errors
    assert message.startswith("error: cannot connect")


async def test_too_many_in_flight_is_an_error_not_a_delay() -> None:
    server = FakeOpenAI(gate=asyncio.Event())
    assert server.gate is not None
    async with server.serve():
        sender = Sender(server, max_in_flight=2)
        running = asyncio.create_task(sender.open(sessions(5), rate=1000.0))
        await _until(lambda: sender.load.counts.failed == 3 and server.num_streams == 2)
        server.gate.set()
        result = await running
    assert server.most_streams == 2
    assert result.overall.completed == 2
    assert result.errors == {"error: not sent: 2 requests were in flight": 3}
    unsent = [record for record in sender.records if not record.is_ok]
    assert [record.sent_s for record in unsent] == [None] * 3


async def test_stop_keeps_a_record_of_everything_in_flight() -> None:
    async with FakeOpenAI(gap_s=0.01).serve() as server:
        sender = Sender(server)
        running = asyncio.create_task(sender.open(sessions(6, max_tokens=10_000), rate=1000.0))
        await _until(lambda: sender.load.counts.tokens >= 12)
        sender.load.stop()
        result = await asyncio.wait_for(running, PATIENCE_S)
    assert sender.load.was_stopped
    assert {record.outcome for record in sender.records} == {Outcome.CANCELLED}
    assert result.overall.cancelled == 6
    assert result.overall.attainment is None
    assert sum(len(record.token_times_s) for record in sender.records) >= 12
    assert sender.load.counts.in_flight == 0


async def test_stop_ends_a_closed_loop() -> None:
    async with FakeOpenAI(first_s=2 * PATIENCE_S).serve() as server:
        sender = Sender(server)
        running = asyncio.create_task(sender.closed(sessions(10), concurrency=2))
        await _until(lambda: server.num_streams == 2)
        sender.load.stop()
        result = await asyncio.wait_for(running, PATIENCE_S)
    assert result.overall.requests == result.overall.cancelled == 2


async def test_nothing_is_sent_after_the_duration() -> None:
    async with FakeOpenAI(first_s=0.02).serve() as server:
        in_open = await Sender(server, duration_s=0.1).open(sessions(1000), rate=100.0)
        in_closed = await Sender(server, duration_s=0.1).closed(sessions(1000), concurrency=2)
    assert in_open.overall.completed == 10
    assert 2 <= in_closed.overall.completed <= 12
    assert in_open.overall.failed == in_closed.overall.failed == 0


async def test_turns_follow_each_other_after_the_think_time() -> None:
    turns = tuple(session.requests[0] for session in sessions(3))
    session = Session(requests=turns, think_times_s=(0.0, 0.03, 0.05))
    async with FakeOpenAI(first_s=0.01).serve() as server:
        sender = Sender(server)
        await sender.closed([session], concurrency=1)
    first, second, third = sender.records
    assert second.scheduled_s == pytest.approx(first.ended_s + 0.03)
    assert third.scheduled_s == pytest.approx(second.ended_s + 0.05)
    assert second.sent_s is not None and second.sent_s >= second.scheduled_s - 0.002


class Broken:
    """A target with a bug."""

    async def send(self, request: BenchRequest, on_tokens: OnTokens) -> Answer:
        raise KeyError("oops")

    async def aclose(self) -> None: ...


async def test_a_bug_in_a_target_is_an_error_of_its_request() -> None:
    records: list[RequestRecord] = []
    options = LoadOptions(deployment="d", workload="w")
    await Load(Broken(), options, RunClock(), records.append).run_closed(sessions(2), 1)
    assert [record.error for record in records] == ["KeyError: 'oops'"] * 2


async def test_goodput_counts_from_the_schedule() -> None:
    async with FakeOpenAI(first_s=SERVICE_S, one_at_a_time=True).serve() as server:
        sender = Sender(server)
        await sender.open(sessions(20), rate=100.0)
    # The wait grows by 10 ms a request: those from the ninth on cannot meet it.
    overall = statistics_of(sender.records, parse_slo("ttft=0.1")).overall
    assert overall.completed == 20
    assert overall.met_slo <= 9


async def _until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_true():
            await asyncio.sleep(0.005)
