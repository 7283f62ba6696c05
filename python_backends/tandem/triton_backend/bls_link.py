"""The link to the pools of this server: Triton's business logic scripting (BLS)."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from tandem import wire
from tandem.errors import InvalidRequest, Unavailable
from tandem.triton_backend.responses import error_from_response
from tandem.wire import Admitted, PrefillReply, SequenceSpec

_decode_prefill = wire.decoder(PrefillReply).decode
_decode_admitted = wire.decoder(Admitted).decode


class BLSLink:
    """Calls wait in a thread of the running loop's default executor, one each, and so many at
    most for each pool: a full pool must leave the other its threads.
    """

    def __init__(self, max_calls_per_pool: int) -> None:
        self._places = {
            model: asyncio.Semaphore(max_calls_per_pool) for model in ("prefill", "decode")
        }

    async def prefill(self, spec: SequenceSpec) -> tuple[PrefillReply, bytes]:
        result, handle = await self._call("prefill", spec, b"")
        return _decode_prefill(result), handle

    async def decode(self, spec: SequenceSpec, handle: bytes) -> Admitted:
        try:
            result, _ = await self._call("decode", spec, handle)
        except InvalidRequest as error:
            if error.field != "handle":
                raise
            # Ours, so it was good once: the prefill is repeated, the user has done nothing wrong.
            raise Unavailable(f"the KV handle was refused: {error}") from error
        return _decode_admitted(result)

    async def _call(self, model: str, spec: SequenceSpec, handle: bytes) -> tuple[bytes, bytes]:
        await self._places[model].acquire()
        # Who waits for it may be cancelled; the thread, and so the place, is taken till its end.
        call = asyncio.ensure_future(_execute(model, spec, handle))

        def give_back(call: asyncio.Future[tuple[bytes, bytes]]) -> None:
            self._places[model].release()
            if not call.cancelled():
                call.exception()  # or asyncio reports one that nobody waited for

        call.add_done_callback(give_back)
        return await asyncio.shield(call)


async def _execute(model: str, spec: SequenceSpec, handle: bytes) -> tuple[bytes, bytes]:
    request = pb_utils.InferenceRequest(
        model_name=model,
        requested_output_names=["result", "handle"],
        inputs=[_tensor("request", wire.encode(spec)), _tensor("handle", handle)],
    )
    try:
        response = await request.async_exec()
    except pb_utils.TritonModelException as error:  # e.g. the model is not loaded
        raise Unavailable(f"model {model}: {error}") from error
    if response.has_error():
        raise error_from_response(response.error().message())
    return _bytes(response, "result"), _bytes(response, "handle")


def _tensor(name: str, value: bytes) -> Any:
    return pb_utils.Tensor(name, np.array([[value]], dtype=np.object_))


def _bytes(response: Any, name: str) -> bytes:
    tensor = pb_utils.get_output_tensor_by_name(response, name)
    return bytes(tensor.as_numpy().reshape(-1)[0])
