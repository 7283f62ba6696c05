"""The link to the pools of this server: Triton's business logic scripting (BLS)."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from tandem.error_text import error_from_text
from tandem.errors import ShuttingDown, Unavailable
from tandem.orchestrator.call_places import CallPlaces
from tandem.orchestrator.link import TritonLink
from tandem.types import Role

_STOPPING = "Server not ready"  # Triton's own words, once it has unloaded the pools


class BLSLink(TritonLink):
    """Calls wait in a thread of the running loop's default executor, one each. Which worker takes
    one is Triton's choice.
    """

    def __init__(self, places: CallPlaces) -> None:
        self._places = places

    async def call(
        self, role: Role, request: bytes, handle: bytes, worker: str | None
    ) -> tuple[bytes, bytes]:
        return await self._places.run(role, lambda: _execute(role, request, handle))

    async def start(self) -> None:
        """Triton is there."""

    async def stop(self) -> None:
        """It ends by itself what is under way."""


async def _execute(role: Role, request: bytes, handle: bytes) -> tuple[bytes, bytes]:
    model = role.value
    call = pb_utils.InferenceRequest(
        model_name=model,
        requested_output_names=["result", "handle"],
        inputs=[_tensor("request", request), _tensor("handle", handle)],
    )
    try:
        response = await call.async_exec()
    except pb_utils.TritonModelException as error:  # e.g. the model is not loaded
        raise Unavailable(f"model {model}: {error}") from error
    if response.has_error():
        message = response.error().message()
        if _STOPPING in message:
            raise ShuttingDown("the server is stopping")
        raise error_from_text(message) or Unavailable(message)
    return _bytes(response, "result"), _bytes(response, "handle")


def _tensor(name: str, value: bytes) -> Any:
    return pb_utils.Tensor(name, np.array([[value]], dtype=np.object_))


def _bytes(response: Any, name: str) -> bytes:
    tensor = pb_utils.get_output_tensor_by_name(response, name)
    return bytes(tensor.as_numpy().reshape(-1)[0])
