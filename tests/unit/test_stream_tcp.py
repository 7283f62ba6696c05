"""The stream plane between hosts: encrypted, and closed to everybody without the secret."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from tandem import wire
from tandem.config import Deployment
from tandem.engine.admission import Admission, EngineLimits
from tandem.errors import EngineDied, InvalidRequest
from tandem.orchestrator.stream_listener import listener_for
from tandem.orchestrator.stream_plane import StreamPlane
from tandem.stream_address import StreamKeys, connect, parse_tcp_name, tcp_name
from tandem.triton_backend.engine_obituary import Mourners
from tandem.types import Load, Role, SamplingParams

PATIENCE_S = 5.0


def deployment(directory: Path, secret: bytes = b"geheim", host: str = "127.0.0.1") -> Deployment:
    return Deployment(
        model="m",
        runtime_dir=str(directory),
        secret=secret,
        is_secret_shared=True,
        stream_host=host,
    )


def step(sequence_id: str, token_id: int) -> bytes:
    return wire.encode(
        wire.StepMessage(
            worker="decode_0_0@there",
            incarnation="aa",
            load=Load(role=Role.DECODE),
            tokens=[wire.TokenEvent(sequence_id, 0, token_id)],
        )
    )


def spec(reply_to: str) -> bytes:
    return wire.encode(
        wire.SequenceSpec(
            sequence_id="s",
            reply_to=reply_to,
            prompt_ids=(1,),
            sampling=SamplingParams(max_tokens=1),
        )
    )


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[StreamPlane]:
    plane = StreamPlane("llm_0_0", listener_for(deployment(tmp_path), "llm_0_0"), 10.0)
    plane.start()
    assert (tmp_path / "stream-llm_0_0").is_file(), "a drain looks for it"
    yield plane
    await plane.stop()
    assert not (tmp_path / "stream-llm_0_0").exists()


@pytest.fixture
def sockets() -> Any:
    context = zmq.Context()
    context.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
    context.setsockopt(zmq.LINGER, 0)
    yield lambda: context.socket(zmq.DEALER)
    context.destroy(linger=0)


async def test_an_engine_with_the_secret_is_heard_and_hears(
    plane: StreamPlane, sockets: Any, tmp_path: Path
) -> None:
    stream, engine = plane.open("a"), sockets()
    connect(engine, deployment(tmp_path / "elsewhere"), plane.reply_to)
    engine.send(step("a", 7))
    event = await asyncio.wait_for(stream.get(), PATIENCE_S)
    assert isinstance(event, wire.TokenEvent) and event.token_id == 7
    answer = await asyncio.to_thread(engine.recv)
    assert wire.decode_from_orchestrator(answer) == wire.Cancel(sequence_ids=[])


@asynccontextmanager
async def rejected(socket: Any) -> AsyncIterator[None]:
    """The connection that is made meanwhile does not last."""
    monitor = socket.get_monitor_socket(
        zmq.EVENT_HANDSHAKE_FAILED_AUTH
        | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        | zmq.EVENT_DISCONNECTED
    )
    try:
        yield
        await asyncio.to_thread(monitor.recv_multipart)
    finally:
        socket.disable_monitor()
        monitor.close(linger=0)


def with_another_secret(socket: Any, plane: StreamPlane, directory: Path) -> None:
    connect(socket, deployment(directory, secret=b"geraten"), plane.reply_to)


def without_any_key(socket: Any, plane: StreamPlane, directory: Path) -> None:
    socket.connect(f"tcp://{parse_tcp_name(plane.reply_to)}")


def with_a_key_of_its_own(socket: Any, plane: StreamPlane, directory: Path) -> None:
    """It has found out the orchestrator's public key."""
    socket.curve_serverkey = StreamKeys.derive(b"geheim").orchestrator_public
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    without_any_key(socket, plane, directory)


@pytest.mark.parametrize(
    "connect_as", [with_another_secret, without_any_key, with_a_key_of_its_own]
)
async def test_a_peer_without_the_secret_is_rejected(
    plane: StreamPlane, sockets: Any, tmp_path: Path, connect_as: Any
) -> None:
    stranger, engine, stream = sockets(), sockets(), plane.open("a")
    async with rejected(stranger):
        connect_as(stranger, plane, tmp_path)
        stranger.send(step("a", 666))
    connect(engine, deployment(tmp_path), plane.reply_to)
    engine.send(step("a", 7))
    event = await asyncio.wait_for(stream.get(), PATIENCE_S)
    assert isinstance(event, wire.TokenEvent) and event.token_id == 7
    assert len(plane.workers) == 1


async def test_an_engine_tells_nothing_to_who_has_not_the_secret(
    sockets: Any, tmp_path: Path
) -> None:
    context = zmq.asyncio.Context()
    impostor = context.socket(zmq.ROUTER)
    listener = listener_for(deployment(tmp_path, secret=b"geraten"), "llm_0_0")
    name = listener.bind(context, impostor)
    engine = sockets()
    async with rejected(engine):
        connect(engine, deployment(tmp_path), name)
        engine.send(step("a", 7))
    assert not await impostor.poll(0)
    impostor.close(linger=0)
    listener.close()
    context.term()


async def test_the_end_of_an_engine_is_told_to_orchestrators_of_other_hosts(
    plane: StreamPlane, tmp_path: Path
) -> None:
    mourners = Mourners(deployment(tmp_path / "elsewhere"))
    for payload in (spec(plane.reply_to), spec("llm_0_0"), spec("tcp:name:1"), b"\xc1"):
        mourners.note(payload)
    stream = plane.open("a")
    plane.admitted(stream, "decode_0_0@there", "aa")
    context = zmq.asyncio.Context()
    ended = wire.EngineEnded(worker="decode_0_0@there", incarnation="aa", reason="exited with -9")
    await mourners.tell(context, ended)
    with pytest.raises(EngineDied, match="exited with -9"):
        await asyncio.wait_for(stream.get(), PATIENCE_S)
    context.destroy(linger=0)


def test_keys_depend_on_the_secret_and_show_nowhere() -> None:
    keys = StreamKeys.derive(b"geheim")
    assert keys == StreamKeys.derive(b"geheim") != StreamKeys.derive(b"geheim2")
    assert len({keys.orchestrator_secret, keys.engine_secret, keys.engine_public}) == 3
    assert keys.engine_secret.decode() not in repr(keys)


@pytest.mark.parametrize("host", ["10.0.0.1", "fd00::1"])
def test_a_name_says_where_the_orchestrator_is(host: str) -> None:
    assert parse_tcp_name(tcp_name(host, 5557)) == (host, 5557)
    assert parse_tcp_name("llm_0_0") is None


BAD_NAMES = ["tcp:", "tcp:host:1", "tcp:10.0.0.1", "tcp:10.0.0.1:0", "tcp:10.0.0.1:70000"]


@pytest.mark.parametrize("name", [*BAD_NAMES, "tcp:10.0.0.1:x"])
def test_an_engine_connects_to_no_bad_address(name: str) -> None:
    limits = EngineLimits(Role.DECODE, 16, 100, 100, may_reply_over_tcp=True)
    with pytest.raises(InvalidRequest, match="reply_to: "):
        admit(limits, name)


def test_an_engine_connects_to_other_hosts_only_if_it_shares_a_secret() -> None:
    limits = EngineLimits(Role.DECODE, 16, 100, 100)
    with pytest.raises(InvalidRequest, match="reply_to: .*TANDEM_SECRET"):
        admit(limits, "tcp:10.0.0.1:5557")
    shared = EngineLimits(Role.DECODE, 16, 100, 100, may_reply_over_tcp=True)
    assert admit(shared, "tcp:10.0.0.1:5557").reply_to == "tcp:10.0.0.1:5557"
    assert admit(limits, "llm_0_0").reply_to == "llm_0_0"


def admit(limits: EngineLimits, reply_to: str) -> wire.SequenceSpec:
    admission = Admission(limits, imports=None)  # type: ignore[arg-type]  # no handle, no import
    return admission.admit(wire.Submit(call_id=1, spec=spec(reply_to)), set())[0]
