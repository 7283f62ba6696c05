"""Tells every orchestrator that an engine is gone."""

from __future__ import annotations

import logging
from collections import OrderedDict
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from tandem import wire
from tandem.config import Deployment
from tandem.stream_address import connect, parse_tcp_name

_LINGER_MS = 500
_MAX_REMEMBERED = 64
_log = logging.getLogger(__name__)


class _Addressed(msgspec.Struct):
    """The part of a ``SequenceSpec`` that says who wants its tokens."""

    reply_to: wire.Name


_decode_addressed = wire.decoder(_Addressed).decode


class Mourners:
    """The orchestrators of this host, whose sockets are in the runtime directory, and those of
    other hosts that gave the engine sequences. One that nobody reads any more costs nothing.
    """

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._remote: OrderedDict[str, None] = OrderedDict()  # the latest last

    def note(self, spec: bytes) -> None:
        """A sequence for the engine, who checks it."""
        if not self._deployment.is_secret_shared:
            return
        try:
            name = _decode_addressed(spec).reply_to
            is_remote = parse_tcp_name(name) is not None
        except (msgspec.DecodeError, ValueError):
            return
        if is_remote:
            self._remote[name] = None
            self._remote.move_to_end(name)
            if len(self._remote) > _MAX_REMEMBERED:
                self._remote.popitem(last=False)

    async def tell(self, context: zmq.asyncio.Context, message: wire.EngineEnded) -> None:
        sockets = Path(self._deployment.runtime_dir).glob("stream-*")
        for name in [*(path.name.removeprefix("stream-") for path in sockets), *self._remote]:
            socket = context.socket(zmq.DEALER)
            try:
                connect(socket, self._deployment, name)
                await socket.send(wire.encode(message), flags=zmq.NOBLOCK)
            except zmq.ZMQError as error:
                _log.warning("the end of engine %s could not be told: %s", message.worker, error)
            finally:
                socket.close(linger=_LINGER_MS)
