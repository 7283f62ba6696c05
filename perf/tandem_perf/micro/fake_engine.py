"""A process that sends step messages over ZeroMQ as an engine does, encoded beforehand."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import zmq

_TIMEOUT_S = 60.0


@contextmanager
def fake_engine(address: str, payloads: list[bytes], pause_s: float) -> Iterator[Connection]:
    """A process that sends all payloads whenever something comes through the connection."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    arguments = (address, payloads, pause_s, there)
    process = spawn.Process(target=act_as_engine, args=arguments, daemon=True)
    process.start()
    there.close()
    try:
        yield here
    finally:
        here.close()
        process.join(_TIMEOUT_S)


def act_as_engine(
    address: str, payloads: list[bytes], pause_s: float, parent: Connection
) -> None:
    """Runs in the other process until the parent closes its end."""
    with zmq.Context() as context:
        while True:
            try:
                parent.recv()
            except EOFError:
                return
            with context.socket(zmq.DEALER) as socket:
                socket.sndhwm = 0
                socket.linger = int(_TIMEOUT_S * 1e3)
                socket.connect(address)
                for payload in payloads:
                    socket.send(payload)
                    time.sleep(pause_s)
