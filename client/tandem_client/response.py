"""What comes back: one ``Response`` per message of the server, whatever the protocol."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tandem_client.errors import ServerError


class Timings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where the time went, as the server measured it. Fields it did not send are None or 0.

    ``path`` is "remote" (a prefill worker computed the KV cache) or "local" (the decode worker).
    ``transport`` moved the cache.
    """

    path: str | None = None
    prefill_worker: str | None = None
    decode_worker: str | None = None
    queue_ms: float | None = None
    prefill_ms: float | None = None
    transfer_ms: float | None = None
    decode_ms: float | None = None
    ttft_ms: float | None = None
    cached_tokens: int = 0
    kv_bytes: int = 0
    transport: str | None = None
    retries: int = 0


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """One message of the server. Only the last has a ``finish_reason``, counts and timings."""

    text: str = ""
    output_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    finish_reason: str | None = None
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None
    timings: Timings | None = None


def response_from_outputs(outputs: Mapping[str, Any]) -> Response:
    """The response of named outputs, each a list of elements or, if it has one, a bare scalar."""
    timings = _scalar(outputs.get("timings"))
    fields = {
        "text": _scalar(outputs.get("text_output")) or "",
        "output_ids": _elements(outputs.get("output_ids")),
        "logprobs": _elements(outputs.get("logprobs")),
        "finish_reason": _scalar(outputs.get("finish_reason")),
        "num_input_tokens": _scalar(outputs.get("num_input_tokens")),
        "num_output_tokens": _scalar(outputs.get("num_output_tokens")),
    }
    try:
        if timings is not None:
            fields["timings"] = msgspec.json.decode(timings, type=Timings)
        return msgspec.convert(fields, Response)
    except (msgspec.MsgspecError, TypeError) as error:
        raise ServerError(f"malformed response: {error}") from error


def _scalar(value: Any) -> Any:
    if isinstance(value, list):
        return value[0] if len(value) == 1 else value or None
    return value


def _elements(value: Any) -> Any:
    return value if value is None or isinstance(value, list) else [value]
