"""The clients a program uses, blocking and asyncio; same arguments, same answers."""

from __future__ import annotations

from types import TracebackType
from typing import Self, Unpack

from tandem_client.assembly import Completion
from tandem_client.request import GenerateParams, GenerateRequest, build_request
from tandem_client.stream import AsyncStream, Stream
from tandem_client.transports.base import Endpoint
from tandem_client.transports.registry import open_async_transport, open_transport

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_MODEL = "llm"
DEFAULT_TIMEOUT_S = 600.0
DEFAULT_CONNECT_TIMEOUT_S = 5.0


class TandemClient:
    """Blocking client; threads may share it.

    ``url``: http://, https:// or grpc:// and host:port. ``timeout``: seconds from sending a
    request to its last response. ``connect_timeout``: seconds to reach the server.
    Every method but ``is_ready`` raises TandemClientErrors (see ``tandem_client.errors``).
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        model: str = DEFAULT_MODEL,
        timeout: float = DEFAULT_TIMEOUT_S,
        connect_timeout: float = DEFAULT_CONNECT_TIMEOUT_S,
    ) -> None:
        self._transport = open_transport(Endpoint(url, model, timeout, connect_timeout))

    def generate(self, prompt: str | None = None, **params: Unpack[GenerateParams]) -> Completion:
        """The whole answer to ``prompt``, ``messages=`` or ``input_ids=``, in one response."""
        with self.send(build_request(prompt, False, params)) as stream:
            return stream.result()

    def stream(self, prompt: str | None = None, **params: Unpack[GenerateParams]) -> Stream:
        """The answer in chunks, as its tokens come."""
        return self.send(build_request(prompt, True, params))

    def send(self, request: GenerateRequest) -> Stream:
        """The answer to a request made beforehand; one chunk unless ``request.stream``."""
        return Stream(self._transport.send(request))

    def is_ready(self) -> bool:
        """Whether the server can be reached and both it and the model are ready."""
        return self._transport.is_ready()

    def close(self) -> None:
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class AsyncTandemClient:
    """Asyncio client with the arguments of TandemClient; tasks of one event loop share it."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        model: str = DEFAULT_MODEL,
        timeout: float = DEFAULT_TIMEOUT_S,
        connect_timeout: float = DEFAULT_CONNECT_TIMEOUT_S,
    ) -> None:
        self._transport = open_async_transport(Endpoint(url, model, timeout, connect_timeout))

    async def generate(
        self, prompt: str | None = None, **params: Unpack[GenerateParams]
    ) -> Completion:
        """The whole answer to ``prompt``, ``messages=`` or ``input_ids=``, in one response."""
        async with self.send(build_request(prompt, False, params)) as stream:
            return await stream.result()

    def stream(self, prompt: str | None = None, **params: Unpack[GenerateParams]) -> AsyncStream:
        """The answer in chunks, as its tokens come."""
        return self.send(build_request(prompt, True, params))

    def send(self, request: GenerateRequest) -> AsyncStream:
        """The answer to a request made beforehand; one chunk unless ``request.stream``."""
        return AsyncStream(self._transport.send(request))

    async def is_ready(self) -> bool:
        """Whether the server can be reached and both it and the model are ready."""
        return await self._transport.is_ready()

    async def aclose(self) -> None:
        await self._transport.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()
