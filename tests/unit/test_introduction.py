"""Meeting an exporter: what it says is checked, and nobody can keep it from answering others."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest

from tandem import wire
from tandem.errors import PullFailed
from tandem.transport.introduction import VERSION, Acquaintance, Introduction, IntroductionServer

ME = Introduction(
    version=VERSION,
    backend="UCX",
    agent="a",
    metadata=b"\x00\xff",
    address=2**63,
    num_blocks=3,
    block_bytes=5,
    num_slots=2,
)
SOON_S = 10.0


@pytest.fixture(params=["127.0.0.1", "::1"])
def server(request: pytest.FixtureRequest) -> Iterator[IntroductionServer]:
    try:
        server = IntroductionServer(request.param, "one", ME)
    except OSError as error:
        pytest.skip(f"no {request.param} here: {error}")
    yield server
    server.close()


def test_an_exporter_introduces_itself(server: IntroductionServer) -> None:
    acquaintance = Acquaintance(server.endpoint, "one", SOON_S)
    assert acquaintance.introduction == ME
    assert acquaintance.is_alive
    acquaintance.close()


def test_only_its_own_incarnation_is_answered(server: IntroductionServer) -> None:
    with pytest.raises(PullFailed, match="another incarnation"):
        Acquaintance(server.endpoint, "two", SOON_S)


def test_strangers_do_not_keep_it_from_answering(server: IntroductionServer) -> None:
    host, _, port = server.endpoint.rpartition(":")
    silent = socket.create_connection((host, int(port)))
    rude = socket.create_connection((host, int(port)))
    rude.sendall(b"\xff" * 64)
    acquaintance = Acquaintance(server.endpoint, "one", SOON_S)
    assert rude.recv(1) == b"", "thrown out"
    for connection in (acquaintance, silent, rude):
        connection.close()


def test_after_close_nobody_is_let_in() -> None:
    server = IntroductionServer("127.0.0.1", "one", ME)
    server.close()
    with pytest.raises(PullFailed, match="the exporting engine is gone"):
        Acquaintance(server.endpoint, "one", SOON_S)


@contextmanager
def _answering(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Somebody else listens at the endpoint."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join(SOON_S)


def _frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "little") + payload


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"", "does not answer: the connection ended"),
        (_frame(b"abc")[:-1], "does not answer: the connection ended"),
        (b"HTTP/1.1 400 Bad Request", "does not answer: a message of"),
        (_frame(b"\xc1"), "the exporting engine's answer"),
        (_frame(wire.encode(msgspec.structs.replace(ME, version=2))), "version 2, here 1"),
        (_frame(wire.encode(ME) + b"x"), "the exporting engine's answer"),
    ],
)
def test_a_strange_answer_is_refused(answer: bytes, problem: str) -> None:
    def reply(connection: socket.socket) -> None:
        connection.recv(64)
        connection.sendall(answer)

    with _answering(reply) as endpoint, pytest.raises(PullFailed, match=problem):
        Acquaintance(endpoint, "one", SOON_S)


def test_silence_is_given_up() -> None:
    done = threading.Event()
    with _answering(lambda connection: done.wait(SOON_S) and None) as endpoint:
        with pytest.raises(PullFailed, match="does not answer: timed out"):
            Acquaintance(endpoint, "one", 0.05)
        done.set()


def test_the_end_of_the_exporter_is_noticed() -> None:
    go = threading.Event()

    def introduce_and_leave(connection: socket.socket) -> None:
        connection.recv(64)
        connection.sendall(_frame(wire.encode(ME)))
        go.wait(SOON_S)

    with _answering(introduce_and_leave) as endpoint:
        acquaintance = Acquaintance(endpoint, "one", SOON_S)
        assert acquaintance.is_alive
        go.set()
    assert not acquaintance.is_alive
    acquaintance.close()
    assert not acquaintance.is_alive
