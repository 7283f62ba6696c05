"""Triton's responses: errors, and the last one of a request."""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils as pb_utils

from tandem.error_text import error_text
from tandem.errors import TandemError


def error_response(error: TandemError) -> Any:
    """The code is in the text as well: streams carry only the text."""
    # pb_utils gets these names only after the model's module was imported.
    code = getattr(pb_utils.TritonError, error.code.value)
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(error_text(error), code))


def send_final(sender: Any, response: Any) -> None:
    """The one final response of a request; its sender must not be used after it."""
    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
