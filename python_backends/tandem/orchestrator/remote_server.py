"""One server of a pool on another host: calls to it, and whether it answers."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from tritonclient.grpc.aio import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from tandem import wire
from tandem.error_text import error_from_text
from tandem.errors import InvalidRequest, TandemError, Unavailable
from tandem.types import Role

_CUT_AFTER = 2  # probes without an answer, one after the other
_CHANNEL = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),  # what was learnt of a dead server dies with it
]
_log = logging.getLogger(__name__)


class _Reply(msgspec.Struct):
    """What all replies of a pool have in common."""

    worker: str


_decode_reply = wire.decoder(_Reply).decode


@dataclass(frozen=True, kw_only=True)
class Probing:
    """How a server is watched: seconds between probes, for an answer, and between probes of one
    that has long been away (its pause doubles with every failure).
    """

    every_s: float = 1.0
    timeout_s: float = 3.0
    max_pause_s: float = 5.0


class RemoteServer:
    """Owned by the orchestrator's event loop. A fault of a request is none of the server's."""

    def __init__(self, role: Role, address: str, probing: Probing) -> None:
        self.address = address
        self.workers: set[str] = set()  # its workers, as far as they have answered
        self._role = role
        self._probing = probing
        self._client = InferenceServerClient(address, channel_args=_CHANNEL)
        self._calls: set[asyncio.Task[tuple[bytes, bytes]]] = set()
        self._num_failures = 0
        self._watch = asyncio.create_task(self._keep_probing())

    def __str__(self) -> str:
        return f"{self._role} server {self.address}"

    @property
    def is_healthy(self) -> bool:
        return self._num_failures == 0

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    async def call(self, request: bytes, handle: bytes) -> tuple[bytes, bytes]:
        """``result`` and ``handle``. Goes on when its caller is cancelled; ends when the server
        gives no sign of life.
        """
        call = asyncio.create_task(self._infer(request, handle))
        self._calls.add(call)
        call.add_done_callback(self._ended)
        try:
            return await asyncio.shield(call)
        finally:
            del call  # it keeps its error, whose traceback keeps this frame and all its callers'

    async def close(self, *, wait: bool) -> None:
        """With ``wait`` after the calls that are under way, else it ends them."""
        if wait and self._calls:
            await asyncio.wait(self._calls)
        self._watch.cancel()
        self._cut()
        await asyncio.gather(self._watch, *self._calls, return_exceptions=True)
        await self._client.close()

    def _ended(self, call: asyncio.Task[tuple[bytes, bytes]]) -> None:
        self._calls.discard(call)
        if not call.cancelled():
            call.exception()  # or asyncio reports one that nobody waited for

    async def _infer(self, request: bytes, handle: bytes) -> tuple[bytes, bytes]:
        inputs = [_tensor("request", request), _tensor("handle", handle)]
        try:
            response = await self._client.infer(self._role.value, inputs)
        except asyncio.CancelledError:  # nobody else cancels it
            raise Unavailable(f"{self} gives no sign of life") from None
        except InferenceServerException as error:
            raise self._error(error) from error
        result = _bytes(response, "result")
        self.workers.add(_decode_reply(result).worker)
        return result, _bytes(response, "handle")

    def _error(self, error: InferenceServerException) -> TandemError:
        text = str(error.message())
        if (known := error_from_text(text)) is not None:
            return known  # of its engine: the server has answered
        if error.status() == "StatusCode.INVALID_ARGUMENT":
            return InvalidRequest("request", text)
        self._failed(text)
        return Unavailable(f"{self}: {text}")

    async def _keep_probing(self) -> None:
        num_unanswered = 0
        while True:
            pause_s = self._probing.every_s * 2.0**self._num_failures
            await asyncio.sleep(min(self._probing.max_pause_s, pause_s))
            try:
                timeout_s = self._probing.timeout_s
                is_ready = await self._client.is_model_ready(
                    self._role.value, client_timeout=timeout_s
                )
            except InferenceServerException as error:
                num_unanswered += 1
                self._failed(str(error.message()), num_more=1)
                if num_unanswered >= _CUT_AFTER:
                    self._cut()
                continue
            num_unanswered = 0
            if is_ready:
                self._answered()
            else:
                self._failed(f"the model {self._role} is not ready", num_more=1)

    def _answered(self) -> None:
        if not self.is_healthy:
            _log.info("%s answers again", self)
        self._num_failures = 0

    def _failed(self, reason: str, num_more: int = 0) -> None:
        """It gets no calls until a probe succeeds."""
        if self.is_healthy:
            _log.warning("%s is left out: %s", self, reason)
        self._num_failures = max(1, self._num_failures + num_more)
        self.workers.clear()  # it may come back with others

    def _cut(self) -> None:
        for call in self._calls:
            call.cancel()


def _tensor(name: str, value: bytes) -> Any:
    tensor = InferInput(name, [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[value]], dtype=np.object_))
    return tensor


def _bytes(response: Any, name: str) -> bytes:
    return bytes(response.as_numpy(name).reshape(-1)[0])
