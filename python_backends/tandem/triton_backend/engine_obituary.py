"""Tells every orchestrator of this server that an engine is gone."""

from __future__ import annotations

import logging
from pathlib import Path

import zmq
import zmq.asyncio

from tandem import wire

_LINGER_MS = 500
_log = logging.getLogger(__name__)


async def announce_end(
    context: zmq.asyncio.Context, runtime_dir: str, message: wire.EngineEnded
) -> None:
    """Their sockets are in the runtime directory; one that nobody reads any more costs nothing."""
    for path in Path(runtime_dir).glob("stream-*"):
        socket = context.socket(zmq.DEALER)
        try:
            socket.connect(f"ipc://{path}")
            await socket.send(wire.encode(message), flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            _log.warning("the end of engine %s could not be told: %s", message.worker, error)
        finally:
            socket.close(linger=_LINGER_MS)
