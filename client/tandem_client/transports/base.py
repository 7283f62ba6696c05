"""The seam between the client and a protocol: send one request, read its responses."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass
from typing import Protocol

from tandem_client.request import GenerateRequest
from tandem_client.response import Response


@dataclass(frozen=True)
class Endpoint:
    """Where a model is served, and how long to wait for a connection and for a whole answer."""

    url: str
    model: str
    timeout_s: float
    connect_timeout_s: float


class Transport(Protocol):
    """Closing what ``send`` returns, at any point, cancels the request on the server.

    ``send`` raises only TandemClientErrors: DeadlineExceeded once the timeout has passed,
    ConnectionFailed whenever the connection is missing or lost.
    """

    def send(self, request: GenerateRequest) -> Generator[Response, None, None]: ...

    def is_ready(self) -> bool: ...

    def close(self) -> None: ...


class AsyncTransport(Protocol):
    """Like Transport; cancelling the task that reads the responses cancels the request, too."""

    def send(self, request: GenerateRequest) -> AsyncGenerator[Response, None]: ...

    async def is_ready(self) -> bool: ...

    async def aclose(self) -> None: ...
