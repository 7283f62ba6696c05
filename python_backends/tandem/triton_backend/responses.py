"""Triton's error responses, made from ours and read back."""

from __future__ import annotations

import re
from typing import Any

import triton_python_backend_utils as pb_utils

from tandem.errors import EngineFault, ErrorCode, InvalidRequest, TandemError, Unavailable

_CODES = {
    ErrorCode.INVALID_ARG: pb_utils.TritonError.INVALID_ARG,
    ErrorCode.UNAVAILABLE: pb_utils.TritonError.UNAVAILABLE,
    ErrorCode.CANCELLED: pb_utils.TritonError.CANCELLED,
    ErrorCode.INTERNAL: pb_utils.TritonError.INTERNAL,
}


def error_response(error: TandemError) -> Any:
    """The code is in the text as well: streams carry only the text."""
    message = f"[{error.code}] {error}"
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, _CODES[error.code]))


def error_from_response(message: str) -> TandemError:
    """The error a called model answered with; Triton's own (no such model, ...) are Unavailable."""
    match = re.search(r"\[([A-Z_]+)\] (.*)", message, re.DOTALL)
    if match is None:
        return Unavailable(message)
    code, text = match.groups()
    if code == ErrorCode.INVALID_ARG:
        field, _, problem = text.partition(": ")
        return InvalidRequest(field, problem)
    return EngineFault(text) if code == ErrorCode.INTERNAL else Unavailable(text)
