"""The generate extension over an asyncio HTTP client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import httpx

from tandem_client.request import GenerateRequest
from tandem_client.response import Response
from tandem_client.transports.base import Endpoint
from tandem_client.transports.http_messages import (
    LIMITS,
    ResponseDecoder,
    connection_error,
    deadline_error,
    generate_path,
    needs_tls,
    ready_paths,
    request_body,
)

_HEADERS = {"content-type": "application/json"}


class AsyncHttpTransport:
    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._client = httpx.AsyncClient(
            base_url=endpoint.url,
            limits=LIMITS,
            verify=needs_tls(endpoint),
            timeout=httpx.Timeout(None, connect=endpoint.connect_timeout_s),
        )

    async def send(self, request: GenerateRequest) -> AsyncGenerator[Response, None]:
        deadline = asyncio.get_running_loop().time() + self._endpoint.timeout_s
        # The deadline is put around each wait, never around a yield: there it would cancel
        # whatever the reader of this generator happens to be doing.
        try:
            async with asyncio.timeout_at(deadline):
                response = await self._start(request)
            try:
                decoder = ResponseDecoder(response.status_code, request.stream)
                body = response.aiter_bytes()
                while True:
                    async with asyncio.timeout_at(deadline):
                        data = await anext(body, None)
                    if data is None:
                        break
                    for item in decoder.feed(data):
                        yield item
                for item in decoder.end():
                    yield item
            finally:
                await response.aclose()
        except TimeoutError as error:
            raise deadline_error(self._endpoint) from error
        except httpx.TransportError as error:
            raise connection_error(self._endpoint, error) from error

    async def is_ready(self) -> bool:
        try:
            async with asyncio.timeout(self._endpoint.connect_timeout_s):
                for path in ready_paths(self._endpoint.model):
                    if (await self._client.get(path)).status_code != 200:
                        return False
        except (TimeoutError, httpx.TransportError):
            return False
        return True

    async def aclose(self) -> None:
        await self._client.aclose()

    async def _start(self, request: GenerateRequest) -> httpx.Response:
        path = generate_path(self._endpoint.model, request)
        message = self._client.build_request(
            "POST", path, content=request_body(request), headers=_HEADERS
        )
        return await self._client.send(message, stream=True)
