"""Triton's generate extension over HTTP as bytes in and responses out; no I/O."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec

from tandem_client.errors import (
    ConnectionFailed,
    DeadlineExceeded,
    InvalidRequest,
    ServerError,
    TandemClientError,
    Unavailable,
    error_from_server,
)
from tandem_client.request import GenerateRequest
from tandem_client.response import Response, response_from_outputs
from tandem_client.transports.base import Endpoint

# Each stream holds a connection; how many run at once is the server's decision.
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=20)

_ERROR_BY_STATUS: dict[int, type[TandemClientError]] = {
    400: InvalidRequest,
    429: Unavailable,
    503: Unavailable,
}
_MAX_QUOTED = 200


def needs_tls(endpoint: Endpoint) -> bool:
    """Loading the trusted certificates takes longer than all else a client does at its start."""
    return endpoint.url.startswith("https://")


def generate_path(model: str, request: GenerateRequest) -> str:
    return f"/v2/models/{model}/{'generate_stream' if request.stream else 'generate'}"


def ready_paths(model: str) -> tuple[str, str]:
    """Both must answer 200: the server, then the model."""
    return "/v2/health/ready", f"/v2/models/{model}/ready"


def request_body(request: GenerateRequest) -> bytes:
    return msgspec.json.encode(request.inputs())


def deadline_error(endpoint: Endpoint) -> DeadlineExceeded:
    return DeadlineExceeded(f"no complete answer within {endpoint.timeout_s:g} s")


def connection_error(endpoint: Endpoint, error: Exception) -> ConnectionFailed:
    return ConnectionFailed(f"{endpoint.url}: {error or type(error).__name__}")


class ResponseDecoder:
    """Turns the body of one HTTP response, fed in pieces of any size, into responses.

    An event ends with its line feed: what is left without one when the body ends was cut off.
    """

    def __init__(self, status_code: int, is_event_stream: bool) -> None:
        self._status_code = status_code
        self._splits_events = is_event_stream and status_code == 200
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[Response]:
        self._pending += data
        if not self._splits_events:
            return
        # Only LF ends a line here: str.splitlines would also break at a U+2028 inside the text.
        *lines, rest = self._pending.split(b"\n")
        self._pending = rest
        for line in lines:
            if line.startswith(b"data:"):
                yield _response(bytes(line[5:]))

    def end(self) -> Iterator[Response]:
        """The response of a body that is one JSON object; raises what an error status means."""
        if self._splits_events:
            return
        body = bytes(self._pending)
        if self._status_code != 200:
            fallback = _ERROR_BY_STATUS.get(self._status_code, ServerError)
            raise error_from_server(self._error_text(body), fallback)
        yield _response(body)

    def _error_text(self, body: bytes) -> str:
        # An error before the first response of a stream has an error status, but is an event.
        try:
            return str(msgspec.json.decode(body.removeprefix(b"data:"))["error"])
        except (msgspec.MsgspecError, KeyError, TypeError):
            return f"HTTP {self._status_code}: {body[:_MAX_QUOTED].decode(errors='replace')}"


def _response(data: bytes) -> Response:
    try:
        outputs: dict[str, Any] = msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        quoted = data[:_MAX_QUOTED].decode(errors="replace")
        raise ServerError(f"malformed response ({error}): {quoted}") from error
    if "error" in outputs:
        raise error_from_server(str(outputs["error"]), ServerError)
    return response_from_outputs(outputs)
