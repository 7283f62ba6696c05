"""HTTP/1.1 with little cost per request, for load: POST and GET, bodies that stream.

httpx costs 2.3 ms of CPU a request and more with a thousand streams; this about a tenth.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

_READ_BYTES = 65_536


class HttpError(Exception):
    """No connection, a lost one, or something that is not HTTP."""


@dataclass
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def is_usable(self) -> bool:
        return not (self.reader.at_eof() or self.writer.is_closing())

    def abort(self) -> None:
        """At once, so that the server sees that nobody reads any more."""
        self.writer.transport.abort()


class HttpResponse:
    """``pieces`` is the body as it comes; a body that is cut short raises HttpError."""

    def __init__(self, status: int, headers: dict[str, str], reader: asyncio.StreamReader) -> None:
        self.status = status
        self.is_complete = False
        self._headers = headers
        self._reader = reader

    @property
    def keeps_alive(self) -> bool:
        return self._headers.get("connection", "").lower() != "close" and self._has_length

    async def body(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])

    async def pieces(self) -> AsyncIterator[bytes]:
        try:
            if self._is_chunked:
                while size := int((await self._reader.readuntil(b"\r\n")).split(b";")[0], 16):
                    yield (await self._reader.readexactly(size + 2))[:-2]
                while await self._reader.readuntil(b"\r\n") != b"\r\n":
                    pass  # trailers
            elif "content-length" in self._headers:
                yield await self._reader.readexactly(int(self._headers["content-length"]))
            else:
                while piece := await self._reader.read(_READ_BYTES):
                    yield piece
        except asyncio.IncompleteReadError as error:
            raise HttpError("the connection was closed before the end of the answer") from error
        except (OSError, ValueError, asyncio.LimitOverrunError) as error:
            raise HttpError(f"the answer broke off: {error}") from error
        self.is_complete = True

    @property
    def _is_chunked(self) -> bool:
        return "chunked" in self._headers.get("transfer-encoding", "").lower()

    @property
    def _has_length(self) -> bool:
        return self._is_chunked or "content-length" in self._headers


class HttpPool:
    """Connections to one server; as many as there are requests at once."""

    def __init__(self, url: str, headers: dict[str, str], connect_timeout_s: float) -> None:
        """``url``: http(s)://host[:port][/prefix]; raises HttpError."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise HttpError(f"url: must be http://… or https://…; got {url!r}")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host = parts.hostname
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/")
        self._connect_timeout_s = connect_timeout_s
        lines = {"host": parts.netloc, **headers}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._idle: list[_Connection] = []

    @asynccontextmanager
    async def request(
        self, method: str, path: str, body: bytes = b""
    ) -> AsyncIterator[HttpResponse]:
        """The response once its head is there. Raises HttpError. Leaving early cancels it."""
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}"
        message = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
        connection, response = await self._exchange(message)
        try:
            yield response
        finally:
            if response.is_complete and response.keeps_alive:
                self._idle.append(connection)
            else:
                connection.abort()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().abort()

    async def _exchange(self, message: bytes) -> tuple[_Connection, HttpResponse]:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_usable:
                connection.abort()
                continue
            try:
                return connection, await _send(connection, message)
            except HttpError:  # the server closed it between two requests
                continue
        connection = await self._connect()
        return connection, await _send(connection, message)

    async def _connect(self) -> _Connection:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                streams = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        except TimeoutError as error:
            raise HttpError(f"no connection within {self._connect_timeout_s:g} s") from error
        except OSError as error:
            raise HttpError(f"cannot connect to {self._host}:{self._port}: {error}") from error
        return _Connection(*streams)


async def _send(connection: _Connection, message: bytes) -> HttpResponse:
    try:
        connection.writer.write(message)
        await connection.writer.drain()
        while True:
            head = await connection.reader.readuntil(b"\r\n\r\n")
            status, headers = _parse(head)
            if status >= 200:
                return HttpResponse(status, headers, connection.reader)
    except asyncio.IncompleteReadError as error:
        connection.abort()
        raise HttpError("the connection was closed before an answer") from error
    except (OSError, ValueError, IndexError, asyncio.LimitOverrunError) as error:
        connection.abort()
        raise HttpError(f"no answer: {error}") from error
    except BaseException:  # cancelled
        connection.abort()
        raise


def _parse(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines if line)
    return int(first.split(" ")[1]), {name.lower(): value.strip() for name, _, value in pairs}
