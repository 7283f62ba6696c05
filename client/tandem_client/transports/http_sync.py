"""The generate extension over a blocking HTTP client."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress

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

# The deadline timer shuts down a socket; a connection used once can belong to no other request.
_HEADERS = {"content-type": "application/json", "connection": "close"}


class HttpTransport:
    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._client = httpx.Client(
            base_url=endpoint.url,
            limits=LIMITS,
            verify=needs_tls(endpoint),
            timeout=httpx.Timeout(endpoint.timeout_s, connect=endpoint.connect_timeout_s),
        )

    def send(self, request: GenerateRequest) -> Generator[Response, None, None]:
        deadline = time.monotonic() + self._endpoint.timeout_s
        path = generate_path(self._endpoint.model, request)
        body = request_body(request)
        try:
            with (
                self._client.stream("POST", path, content=body, headers=_HEADERS) as response,
                _shut_down_at(deadline, response),
            ):
                decoder = ResponseDecoder(response.status_code, request.stream)
                for data in response.iter_bytes():
                    yield from decoder.feed(data)
                if time.monotonic() >= deadline:
                    raise deadline_error(self._endpoint)
                yield from decoder.end()
        except httpx.TransportError as error:
            is_late = isinstance(error, httpx.ReadTimeout | httpx.WriteTimeout)
            if is_late or time.monotonic() >= deadline:
                raise deadline_error(self._endpoint) from error
            raise connection_error(self._endpoint, error) from error

    def is_ready(self) -> bool:
        try:
            return all(
                self._client.get(path, timeout=self._endpoint.connect_timeout_s).status_code == 200
                for path in ready_paths(self._endpoint.model)
            )
        except httpx.TransportError:
            return False

    def close(self) -> None:
        self._client.close()


@contextmanager
def _shut_down_at(deadline: float, response: httpx.Response) -> Iterator[None]:
    """Wakes a blocked read at the deadline; httpx only limits the wait for each single read."""
    connection: socket.socket = response.extensions["network_stream"].get_extra_info("socket")

    def shut_down() -> None:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(max(0.0, deadline - time.monotonic()), shut_down)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
