"""How a puller gets to know an exporter on another host: one question over TCP.

The exporter answers only to its own incarnation, so what a puller learns is never stale: a
descriptor of an earlier start could crash its successor. The connection then stays open without
traffic; its end tells the puller that the exporting process, or its host, is gone.
"""

from __future__ import annotations

import ipaddress
import socket
import socketserver
import threading

import msgspec

from tandem import wire
from tandem.errors import PullFailed

VERSION = 1
_MAX_BYTES = 1 << 20
_QUESTION_TIMEOUT_S = 5.0


class Introduction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``metadata`` is NIXL's, of the agent ``agent``; ``address`` is that of the region."""

    version: int
    backend: str
    agent: str
    metadata: bytes
    address: int
    num_blocks: int
    block_bytes: int
    num_slots: int


_decoder = wire.decoder(Introduction)


class IntroductionServer:
    """Answers in threads of its own until ``close``; ``endpoint`` is ``address:port``."""

    def __init__(self, host: str, incarnation: str, introduction: Introduction) -> None:
        self._server = _Server(host, incarnation, wire.encode(introduction))
        self.endpoint = f"{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="introduction", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


class Acquaintance:
    """The puller's end: what the exporter said, and whether it is still there."""

    def __init__(self, endpoint: str, incarnation: str, timeout_s: float) -> None:
        """Raises ``PullFailed`` unless that incarnation answers within ``timeout_s``."""
        address = _parse_endpoint(endpoint)
        try:
            self._socket = socket.create_connection(address, timeout_s)
        except OSError as error:
            raise PullFailed(f"the exporting engine is gone: {error}") from error
        try:
            _keep_alive(self._socket)
            self.introduction = self._ask(incarnation)
            self._socket.setblocking(False)
        except BaseException:
            self._socket.close()
            raise

    @property
    def is_alive(self) -> bool:
        try:
            self._socket.recv(1)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False  # nothing is ever sent, so this was the end

    def close(self) -> None:
        self._socket.close()

    def _ask(self, incarnation: str) -> Introduction:
        try:
            _send_frame(self._socket, incarnation.encode())
            answer = _receive_frame(self._socket)
        except (OSError, ValueError) as error:
            raise PullFailed(f"the exporting engine does not answer: {error}") from error
        if not answer:
            raise PullFailed("the peer's region belongs to another incarnation")
        try:
            introduction = _decoder.decode(answer)
        except msgspec.DecodeError as error:
            raise PullFailed(f"the exporting engine's answer: {error}") from error
        if introduction.version != VERSION:
            raise PullFailed(f"the peer speaks version {introduction.version}, here {VERSION}")
        return introduction


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, incarnation: str, answer: bytes) -> None:
        self.incarnation = incarnation.encode()
        self.answer = answer
        if ipaddress.ip_address(host).version == 6:
            self.address_family = socket.AF_INET6
        super().__init__((host, 0), _Handler)


class _Handler(socketserver.BaseRequestHandler):
    server: _Server

    def handle(self) -> None:
        try:
            _keep_alive(self.request)
            self.request.settimeout(_QUESTION_TIMEOUT_S)
            is_mine = _receive_frame(self.request) == self.server.incarnation
            _send_frame(self.request, self.server.answer if is_mine else b"")
            self.request.settimeout(None)
            self.request.recv(1)  # returns when the puller goes
        except (OSError, ValueError):
            pass  # the puller sees its connection end


def _parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Only literal addresses: a handle shall not make an engine resolve names."""
    host, _, port = endpoint.rpartition(":")
    try:
        ipaddress.ip_address(host)
        if not (port.isdecimal() and 0 < int(port) < 65536):
            raise ValueError(f"port {port!r}")
    except ValueError as error:
        raise PullFailed(f"not an address and port: {endpoint!r}: {error}") from error
    return host, int(port)


def _keep_alive(connection: socket.socket) -> None:
    """A host that vanished ends the connection after 11 s."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def _send_frame(connection: socket.socket, payload: bytes) -> None:
    connection.sendall(len(payload).to_bytes(4, "little") + payload)


def _receive_frame(connection: socket.socket) -> bytes:
    size = int.from_bytes(_receive_exactly(connection, 4), "little")
    if size > _MAX_BYTES:
        raise ValueError(f"a message of {size} bytes")
    return _receive_exactly(connection, size)


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        part = connection.recv(size - len(received))
        if not part:
            raise ValueError("the connection ended")
        received += part
    return bytes(received)
