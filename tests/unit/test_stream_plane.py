"""The plane over real sockets; the engine's end is a DEALER in the test."""

import asyncio
import queue
from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import zmq
import zmq.asyncio

from tandem import wire
from tandem.config import Deployment, EngineConfig, EngineSettings
from tandem.engine.engine_io import EngineIO
from tandem.engine.events import Event, OrchestratorGone
from tandem.errors import EngineDied, PullFailed, Unavailable
from tandem.orchestrator.stream_listener import IpcListener
from tandem.orchestrator.stream_plane import StreamPlane
from tandem.triton_backend.engine_obituary import Mourners
from tandem.types import FinishReason, Load, Role

NAME = "llm_0_0"
WORKER_TIMEOUT_S = 10.0
PATIENCE_S = 5.0
T = TypeVar("T")


async def soon(awaitable: Awaitable[T]) -> T:
    return await asyncio.wait_for(awaitable, PATIENCE_S)


class Clock:
    """A worker is silent when the test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class FakeEngine:
    def __init__(
        self,
        context: zmq.asyncio.Context,
        path: Path,
        worker: str = "decode_0_0",
        incarnation: str = "aa",
    ) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self.socket = context.socket(zmq.DEALER)
        self.socket.identity = f"{worker}:{incarnation}".encode()
        self.socket.connect(f"ipc://{path}")

    async def say(self, **content: Any) -> None:
        load = content.pop("load", Load(role=Role.DECODE))
        message = wire.StepMessage(
            worker=self.worker, incarnation=self.incarnation, load=load, **content
        )
        await self.socket.send(wire.encode(message))

    async def hear(self) -> wire.FromOrchestrator:
        return wire.decode_from_orchestrator(await soon(self.socket.recv()))

    async def hear_kind(self, kind: type[T]) -> T:
        """The next message of this kind; pings may come at any time."""
        while not isinstance(message := await self.hear(), kind):
            pass
        return message

    async def hello(self, **content: Any) -> wire.Cancel:
        """Returns when the plane knows this engine: with its answer to a newcomer."""
        await self.say(**content)
        return await self.hear_kind(wire.Cancel)


class Planes:
    """One plane with a short ping, and engines around it."""

    def __init__(self, directory: Path) -> None:
        self.clock = Clock()
        self.path = directory / f"stream-{NAME}"
        listener = IpcListener(str(directory), NAME)
        self.plane = StreamPlane(NAME, listener, WORKER_TIMEOUT_S, ping_s=0.01, clock=self.clock)
        self.context = zmq.asyncio.Context()
        self.engines: list[FakeEngine] = []

    def engine(self, worker: str = "decode_0_0", incarnation: str = "aa") -> FakeEngine:
        self.engines.append(FakeEngine(self.context, self.path, worker, incarnation))
        return self.engines[-1]

    async def stop(self) -> None:
        for engine in self.engines:
            engine.socket.close(linger=0)
        self.context.term()
        await self.plane.stop()


@pytest.fixture
async def planes(tmp_path: Path) -> AsyncIterator[Planes]:
    planes = Planes(tmp_path)
    assert len(str(planes.path)) < 100
    planes.plane.start()
    yield planes
    await planes.stop()
    assert not planes.path.exists()


def _token(sequence_id: str, position: int, token_id: int = 7) -> wire.TokenEvent:
    return wire.TokenEvent(sequence_id, position, token_id)


def _prefilled(sequence_id: str) -> wire.Prefilled:
    return wire.Prefilled(sequence_id=sequence_id, num_cached_tokens=0, queue_s=0, prefill_s=0)


async def test_tokens_reach_their_streams_in_order(planes: Planes) -> None:
    a, b = planes.plane.open("a"), planes.plane.open("b")
    engine = planes.engine()
    last = wire.TokenEvent("a", 2, 9, -0.5, FinishReason.STOP)
    await engine.say(tokens=[_token("a", 0), _token("b", 0)], prefilled=[_prefilled("a")])
    await engine.say(tokens=[_token("a", 1), _token("unknown", 3), last])
    assert await soon(a.get()) == _prefilled("a"), "before the token it came with"
    assert [await soon(a.get()) for _ in range(3)] == [_token("a", 0), _token("a", 1), last]
    assert await soon(b.get()) == _token("b", 0)


async def test_a_failure_is_raised_as_what_it_was(planes: Planes) -> None:
    stream, engine = planes.plane.open("a"), planes.engine()
    failed = wire.SequenceFailed(sequence_id="a", error="PullFailed", message="the wire broke")
    unknown = wire.SequenceFailed(sequence_id="unknown", error="EngineFault", message="")
    await engine.say(tokens=[_token("a", 0)], failed=[unknown, failed])
    assert await soon(stream.get()) == _token("a", 0)
    with pytest.raises(PullFailed, match="the wire broke"):
        await soon(stream.get())


async def test_loads_are_those_of_the_last_messages(planes: Planes) -> None:
    assert planes.plane.loads == []
    engine, other = planes.engine(), planes.engine("prefill_0_0", "bb")
    await engine.hello(load=Load(role=Role.DECODE, num_running=1))
    await other.hello(load=Load(role=Role.PREFILL))
    stream = planes.plane.open("a")
    newest = Load(role=Role.DECODE, num_running=2)
    await engine.say(load=newest, tokens=[_token("a", 0)])
    await soon(stream.get())
    assert planes.plane.loads == [newest, Load(role=Role.PREFILL)]


async def test_engines_are_pinged(planes: Planes) -> None:
    engine = planes.engine()
    await engine.say()
    assert await engine.hear_kind(wire.Ping) == wire.Ping()


async def test_a_cancel_goes_to_every_engine(planes: Planes) -> None:
    engines = [planes.engine(), planes.engine("decode_0_1", "bb")]
    for engine in engines:
        assert (await engine.hello()).sequence_ids == []
    stream = planes.plane.open("a")
    planes.plane.close(stream, cancel=True)
    for engine in engines:
        assert (await engine.hear_kind(wire.Cancel)).sequence_ids == ["a"]


async def test_a_stream_that_ended_by_itself_is_not_cancelled(planes: Planes) -> None:
    engine = planes.engine()
    await engine.hello()
    planes.plane.close(planes.plane.open("a"), cancel=False)
    planes.plane.close(planes.plane.open("b"), cancel=True)
    assert (await engine.hear_kind(wire.Cancel)).sequence_ids == ["b"]


async def test_a_newcomer_hears_of_earlier_cancels(planes: Planes) -> None:
    for sequence_id in ("a", "b"):
        planes.plane.close(planes.plane.open(sequence_id), cancel=True)
    assert (await planes.engine().hello()).sequence_ids == ["a", "b"]
    assert (await planes.engine("decode_0_1", "bb").hello()).sequence_ids == ["a", "b"]


async def test_only_the_latest_cancels_are_remembered(planes: Planes) -> None:
    for index in range(300):
        planes.plane.close(planes.plane.open(str(index)), cancel=True)
    remembered = (await planes.engine().hello()).sequence_ids
    assert remembered == [str(index) for index in range(44, 300)]


async def test_a_closed_stream_gets_nothing_more(planes: Planes) -> None:
    stream, other = planes.plane.open("a"), planes.plane.open("b")
    planes.plane.close(stream, cancel=False)
    await planes.engine().say(tokens=[_token("a", 0), _token("b", 0)])
    await soon(other.get())
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(stream.get(), 0)


# ---- leases ----------------------------------------------------------------------------------


async def test_leases_are_renewed_until_the_pull(planes: Planes) -> None:
    engine = planes.engine()
    await engine.hello()
    streams = [planes.plane.open(name) for name in ("pulled", "closed", "waiting")]
    for stream in streams:
        planes.plane.keep_lease(stream)
    first = await engine.hear_kind(wire.Renew)
    assert {*first.sequence_ids} == {"pulled", "closed", "waiting"}
    planes.plane.admitted(streams[0], engine.worker, engine.incarnation)
    planes.plane.close(streams[1], cancel=False)
    renew = await engine.hear_kind(wire.Renew)
    while len(renew.sequence_ids) > 1:  # may have been on its way already
        renew = await engine.hear_kind(wire.Renew)
    assert renew.sequence_ids == ["waiting"]


# ---- dead workers ----------------------------------------------------------------------------


async def test_a_silent_worker_takes_its_streams_with_it(planes: Planes) -> None:
    silent, alive = planes.engine(), planes.engine("decode_0_1", "bb")
    await silent.hello()
    admitted, streaming, other = (planes.plane.open(name) for name in "abc")
    planes.plane.admitted(admitted, silent.worker, silent.incarnation)
    await silent.say(tokens=[_token("b", 0)])
    await soon(streaming.get())
    planes.clock.now_s += WORKER_TIMEOUT_S + 1
    await alive.say(tokens=[_token("c", 0)])
    await soon(other.get())
    for stream in (admitted, streaming):
        with pytest.raises(Unavailable, match="decode_0_0 is silent for 11.0 s"):
            await soon(stream.get())
    assert len(planes.plane.loads) == 1
    await alive.say(tokens=[_token("c", 1)])
    assert await soon(other.get()) == _token("c", 1)


async def test_a_worker_is_not_silent_before_its_timeout(planes: Planes) -> None:
    engine = planes.engine()
    await engine.hello()
    planes.clock.now_s += WORKER_TIMEOUT_S
    await engine.hear_kind(wire.Ping)
    await engine.hear_kind(wire.Ping)
    assert len(planes.plane.loads) == 1


async def test_a_worker_that_was_only_slow_is_a_newcomer_again(planes: Planes) -> None:
    engine, stream = planes.engine(), planes.plane.open("a")
    await engine.say(tokens=[_token("a", 0)])
    await soon(stream.get())
    planes.clock.now_s += WORKER_TIMEOUT_S + 1
    with pytest.raises(Unavailable):
        await soon(stream.get())
    planes.plane.close(stream, cancel=True)
    await engine.say()
    cancel = await engine.hear_kind(wire.Cancel)
    while not cancel.sequence_ids:  # that to its first hello
        cancel = await engine.hear_kind(wire.Cancel)
    assert cancel.sequence_ids == ["a"], "it has to drop what was lost"
    assert len(planes.plane.loads) == 1


async def test_a_worker_that_was_never_heard_is_silent_too(planes: Planes) -> None:
    """Its reply to ``decode`` came over the control plane; then it died before its hello."""
    stream = planes.plane.open("a")
    planes.plane.admitted(stream, "decode_0_0", "aa")
    assert planes.plane.loads == []
    planes.clock.now_s += WORKER_TIMEOUT_S + 1
    with pytest.raises(Unavailable, match="silent"):
        await soon(stream.get())


async def test_a_reply_may_overtake_the_hello(planes: Planes) -> None:
    engine, stream = planes.engine(), planes.plane.open("a")
    planes.plane.admitted(stream, engine.worker, engine.incarnation)
    planes.clock.now_s += WORKER_TIMEOUT_S
    await engine.hello(tokens=[_token("a", 0)])
    planes.clock.now_s += WORKER_TIMEOUT_S
    await engine.hear_kind(wire.Ping)
    assert await soon(stream.get()) == _token("a", 0)


async def test_a_new_incarnation_buries_the_old_one(planes: Planes) -> None:
    old, other = planes.engine(), planes.engine("decode_0_1", "cc")
    await old.hello()
    await other.hello()
    lost, kept = planes.plane.open("a"), planes.plane.open("b")
    planes.plane.admitted(lost, old.worker, old.incarnation)
    planes.plane.admitted(kept, other.worker, other.incarnation)
    new = planes.engine(incarnation="bb")
    await new.hello()
    with pytest.raises(Unavailable, match="started again"):
        await soon(lost.get())
    await other.say(tokens=[_token("b", 0)])
    assert await soon(kept.get()) == _token("b", 0)
    assert len(planes.plane.loads) == 2


async def test_what_a_replaced_engine_still_sends_changes_nothing(planes: Planes) -> None:
    old, new = planes.engine(), planes.engine(incarnation="bb")
    await old.hello()
    await new.hello()
    stream = planes.plane.open("a")
    planes.plane.admitted(stream, new.worker, new.incarnation)
    await old.say(tokens=[_token("a", 0, token_id=666)])
    other = planes.engine("decode_0_1", "cc")
    await other.hello()  # so that what was sent before has been read
    await new.say(tokens=[_token("a", 0)])
    assert await soon(stream.get()) == _token("a", 0)


async def test_a_sequence_admitted_by_a_replaced_engine_is_lost(planes: Planes) -> None:
    old, new = planes.engine(), planes.engine(incarnation="bb")
    await old.hello()
    await new.hello()
    stream = planes.plane.open("a")
    planes.plane.admitted(stream, old.worker, old.incarnation)
    with pytest.raises(EngineDied, match="engine decode_0_0 has ended"):
        await soon(stream.get())


async def test_the_end_of_an_engine_is_told_to_its_streams(planes: Planes) -> None:
    dead, other = planes.engine(), planes.engine("decode_0_1", "cc")
    await dead.hello()
    await other.hello()
    lost, kept, late = (planes.plane.open(name) for name in "abc")
    planes.plane.admitted(lost, dead.worker, dead.incarnation)
    planes.plane.admitted(kept, other.worker, other.incarnation)
    ended = wire.EngineEnded(worker="decode_0_0", incarnation="aa", reason="exited with -9")
    deployment = Deployment(model="m", runtime_dir=str(planes.path.parent), secret=b"s")
    await Mourners(deployment).tell(planes.context, ended)
    with pytest.raises(EngineDied, match="engine decode_0_0 exited with -9"):
        await soon(lost.get())
    planes.plane.admitted(late, dead.worker, dead.incarnation)
    with pytest.raises(EngineDied):
        await soon(late.get())
    await dead.say(tokens=[_token("b", 0, token_id=666)])  # what it still had in its socket
    await other.say(tokens=[_token("b", 0)])
    assert await soon(kept.get()) == _token("b", 0)
    assert len(planes.plane.loads) == 1


async def test_a_predecessor_that_was_never_heard_is_buried_as_well(planes: Planes) -> None:
    stream = planes.plane.open("a")
    planes.plane.admitted(stream, "decode_0_0", "aa")
    await planes.engine(incarnation="bb").hello()
    with pytest.raises(Unavailable, match="started again"):
        await soon(stream.get())


async def test_a_closed_stream_is_not_told_of_deaths(planes: Planes) -> None:
    engine = planes.engine()
    await engine.hello()
    stream = planes.plane.open("a")
    planes.plane.admitted(stream, engine.worker, engine.incarnation)
    planes.plane.close(stream, cancel=False)
    await planes.engine(incarnation="bb").hello()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(stream.get(), 0)


# ---- bad messages ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\xc1"],
        [b"not msgpack"],
        [wire.encode(wire.Ping())],
        [b"\x81\xa4type\xa1\xff"],
        [b"", b"", b""],
        [b"a", wire.encode(wire.Cancel(sequence_ids=[]))],
    ],
    ids=str,
)
async def test_a_message_that_cannot_be_read_is_ignored(
    planes: Planes, frames: list[bytes]
) -> None:
    engine, stream = planes.engine(), planes.plane.open("a")
    await engine.socket.send_multipart(frames)
    await engine.say(tokens=[_token("a", 0)])
    assert await soon(stream.get()) == _token("a", 0)


async def test_a_stale_socket_of_a_killed_orchestrator_is_replaced(tmp_path: Path) -> None:
    (tmp_path / f"stream-{NAME}").write_bytes(b"")
    planes = Planes(tmp_path)
    planes.plane.start()
    engine = planes.engine()
    await engine.hello()
    await planes.stop()


# ---- the engine's own end --------------------------------------------------------------------


class RealEngine:
    """The engine's socket thread, with the shim's end of its channel."""

    def __init__(self, directory: Path, orchestrator_timeout_s: float = 60.0) -> None:
        self.posted: queue.Queue[Event] = queue.Queue()
        self.context = zmq.Context()
        self.shim = self.context.socket(zmq.DEALER)
        self.shim.rcvtimeo = int(PATIENCE_S * 1000)
        self.shim.bind(f"ipc://{directory}/e")
        config = EngineConfig(
            deployment=Deployment(model="m", runtime_dir=str(directory), secret=b"s"),
            settings=EngineSettings(
                role=Role.DECODE, orchestrator_timeout_s=orchestrator_timeout_s
            ),
            worker="decode_0_0",
            device="cpu",
            channel=f"ipc://{directory}/e",
        )
        self.io = EngineIO(config, "aa", self.posted.put)
        self.io.start()

    async def next_event(self) -> Event:
        return await asyncio.to_thread(self.posted.get, True, PATIENCE_S)

    def say(self, name: str, **content: Any) -> None:
        message = wire.StepMessage(
            worker="decode_0_0", incarnation="aa", load=Load(role=Role.DECODE), **content
        )
        self.io.to_orchestrator(name, message)

    def stop(self) -> None:
        self.io.stop()
        self.shim.close(linger=0)
        self.context.term()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[RealEngine]:
    engine = RealEngine(tmp_path)
    yield engine
    engine.stop()


async def test_plane_and_engine_understand_each_other(planes: Planes, engine: RealEngine) -> None:
    stream = planes.plane.open("a")
    engine.say(NAME, tokens=[_token("a", 0)])
    assert await soon(stream.get()) == _token("a", 0)
    planes.plane.close(stream, cancel=True)
    cancels = [await engine.next_event() for _ in range(2)]
    assert cancels == [wire.Cancel(sequence_ids=[]), wire.Cancel(sequence_ids=["a"])]


async def test_an_engine_that_was_met_says_hello_by_itself(
    planes: Planes, engine: RealEngine
) -> None:
    engine.io.load = Load(role=Role.DECODE, num_running=7)
    engine.io.meet(NAME)
    assert await engine.next_event() == wire.Cancel(sequence_ids=[])
    assert planes.plane.loads == [engine.io.load]


async def test_the_engines_channel_to_its_shim(engine: RealEngine) -> None:
    engine.io.to_shim(wire.Left(call_id=3))
    assert wire.decode_from_engine(engine.shim.recv()) == wire.Left(call_id=3)
    engine.shim.send(b"not a message")
    engine.shim.send_multipart([b"two", b"frames"])
    submit = wire.Submit(call_id=4, spec=b"spec")
    engine.shim.send(wire.encode(submit))
    assert await engine.next_event() == submit


async def test_an_engine_ignores_what_it_cannot_read(tmp_path: Path, engine: RealEngine) -> None:
    router = engine.context.socket(zmq.ROUTER)
    router.rcvtimeo = int(PATIENCE_S * 1000)
    router.bind(f"ipc://{tmp_path}/stream-odd")
    engine.io.meet("odd")
    identity, _ = await asyncio.to_thread(router.recv_multipart)
    assert identity == b"decode_0_0:aa"
    for frames in ([b"\xc1"], [b"", b""], [wire.encode(wire.Left(call_id=1))]):
        router.send_multipart([identity, *frames])
    router.send_multipart([identity, wire.encode(wire.Cancel(sequence_ids=["a"]))])
    assert await engine.next_event() == wire.Cancel(sequence_ids=["a"])
    router.close(linger=0)


async def test_a_silent_orchestrator_is_dropped_and_may_come_back(tmp_path: Path) -> None:
    engine = RealEngine(tmp_path, orchestrator_timeout_s=0.1)
    engine.io.meet(NAME)
    assert await engine.next_event() == OrchestratorGone(NAME)
    planes = Planes(tmp_path)
    planes.plane.start()
    engine.io.meet(NAME)
    while await engine.next_event() != wire.Cancel(sequence_ids=[]):
        engine.io.meet(NAME)  # on a busy machine it may be dropped again
    assert len(planes.plane.loads) == 1
    engine.stop()
    await planes.stop()
