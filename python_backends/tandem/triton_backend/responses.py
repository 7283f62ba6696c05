"""Triton's error responses, made from ours and read back."""

from __future__ import annotations

import re
from typing import Any

import triton_python_backend_utils as pb_utils

from tandem.errors import (
    EngineDied,
    EngineFault,
    ErrorCode,
    InvalidRequest,
    TandemError,
    Unavailable,
)

_ENGINE_DIED = "engine died: "  # tells it from other causes, for which there is one code only


def error_response(error: TandemError) -> Any:
    """The code is in the text as well: streams carry only the text."""
    # pb_utils gets these names only after the model's module was imported.
    code = getattr(pb_utils.TritonError, error.code.value)
    cause = _ENGINE_DIED if isinstance(error, EngineDied) else ""
    message = f"[{error.code}] {cause}{error}"
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code))


def send_final(sender: Any, response: Any) -> None:
    """The one final response of a request; its sender must not be used after it."""
    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def error_from_response(message: str) -> TandemError:
    """The error a called model answered with; Triton's own (no such model, ...) are Unavailable."""
    match = re.search(r"\[([A-Z_]+)\] (.*)", message, re.DOTALL)
    if match is None:
        return Unavailable(message)
    code, text = match.groups()
    if code == ErrorCode.INVALID_ARG:
        field, _, problem = text.partition(": ")
        return InvalidRequest(field, problem)
    if text.startswith(_ENGINE_DIED):
        return EngineDied(text.removeprefix(_ENGINE_DIED))
    return EngineFault(text) if code == ErrorCode.INTERNAL else Unavailable(text)
