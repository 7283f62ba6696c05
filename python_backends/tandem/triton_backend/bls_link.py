"""The link to the pools of this server: Triton's business logic scripting (BLS)."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from tandem import wire
from tandem.errors import InvalidRequest, ShuttingDown, Unavailable
from tandem.orchestrator.call_places import CallPlaces
from tandem.triton_backend.responses import error_from_response
from tandem.types import Role
from tandem.wire import Admitted, PrefillReply, SequenceSpec

_STOPPING = "Server not ready"  # Triton's own words, once it has unloaded the pools
_decode_prefill = wire.decoder(PrefillReply).decode
_decode_admitted = wire.decoder(Admitted).decode


class BLSLink:
    """Calls wait in a thread of the running loop's default executor, one each."""

    def __init__(self, places: CallPlaces) -> None:
        self._places = places

    async def prefill(self, spec: SequenceSpec) -> tuple[PrefillReply, bytes]:
        result, handle = await self._call(Role.PREFILL, spec, b"")
        return _decode_prefill(result), handle

    async def decode(self, spec: SequenceSpec, handle: bytes) -> Admitted:
        try:
            result, _ = await self._call(Role.DECODE, spec, handle)
        except InvalidRequest as error:
            if error.field != "handle":
                raise
            # Ours, so it was good once: the prefill is repeated, the user has done nothing wrong.
            raise Unavailable(f"the KV handle was refused: {error}") from error
        return _decode_admitted(result)

    async def _call(self, role: Role, spec: SequenceSpec, handle: bytes) -> tuple[bytes, bytes]:
        return await self._places.run(role, lambda: _execute(role, spec, handle))


async def _execute(role: Role, spec: SequenceSpec, handle: bytes) -> tuple[bytes, bytes]:
    model = role.value  # the models are named after their roles
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
        message = response.error().message()
        if _STOPPING in message:
            raise ShuttingDown("the server is stopping")
        raise error_from_response(message)
    return _bytes(response, "result"), _bytes(response, "handle")


def _tensor(name: str, value: bytes) -> Any:
    return pb_utils.Tensor(name, np.array([[value]], dtype=np.object_))


def _bytes(response: Any, name: str) -> bytes:
    tensor = pb_utils.get_output_tensor_by_name(response, name)
    return bytes(tensor.as_numpy().reshape(-1)[0])
