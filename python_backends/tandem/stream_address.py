"""How an engine, or its shim, reaches an orchestrator on the stream plane.

``reply_to`` names the orchestrator. One on the same host has a socket of that name in the runtime
directory. One on another host is named ``tcp:<IP address>:<port>``; what goes there is encrypted
(CurveZMQ), with keys that both ends derive from the deployment's secret: who does not have it is
neither let in nor believed.
"""

from __future__ import annotations

import hmac
import ipaddress
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils import z85

from tandem.addresses import ServerAddress
from tandem.config import Deployment

_TCP = "tcp:"
_HEARTBEAT_MS = 1000
_HEARTBEAT_TIMEOUT_MS = 5000


@dataclass(frozen=True)
class StreamKeys:
    """Z85 texts of both ends' key pairs."""

    orchestrator_public: bytes
    orchestrator_secret: bytes
    engine_public: bytes
    engine_secret: bytes

    @classmethod
    def derive(cls, secret: bytes) -> StreamKeys:
        return cls(*_key_pair(secret, b"orchestrator"), *_key_pair(secret, b"engine"))

    def __repr__(self) -> str:
        return "StreamKeys()"


def _key_pair(secret: bytes, owner: bytes) -> tuple[bytes, bytes]:
    private = z85.encode(hmac.digest(secret, b"tandem stream plane: " + owner, "sha256"))
    return zmq.curve_public(private), private


def tcp_name(host: str, port: int) -> str:
    """What an orchestrator that listens there puts into ``reply_to``."""
    return f"{_TCP}{host}:{port}"


def parse_tcp_name(name: str) -> ServerAddress | None:
    """None if the orchestrator is on the same host; raises ``ValueError`` for a bad address. Only
    literal ones are good: no sequence shall make an engine resolve names.
    """
    if not name.startswith(_TCP):
        return None
    host, _, port = name.removeprefix(_TCP).rpartition(":")
    if not (port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError(f"port {port!r}")
    return ServerAddress(str(ipaddress.ip_address(host)), int(port))


def socket_path(runtime_dir: str, name: str) -> str:
    return f"{runtime_dir}/stream-{name}"


def connect(socket: zmq.Socket[Any], deployment: Deployment, name: str) -> None:
    """Connects to the orchestrator ``name``; it need not be there yet, or any more."""
    address = parse_tcp_name(name)
    if address is None:
        socket.connect(f"ipc://{socket_path(deployment.runtime_dir, name)}")
        return
    keys = StreamKeys.derive(deployment.secret)
    socket.curve_serverkey = keys.orchestrator_public
    socket.curve_publickey = keys.engine_public
    socket.curve_secretkey = keys.engine_secret
    prepare_tcp(socket, address.host)
    socket.connect(f"tcp://{address}")


def prepare_tcp(socket: zmq.Socket[Any], host: str) -> None:
    """A connection whose other end has vanished is given up."""
    socket.ipv6 = ":" in host
    socket.heartbeat_ivl = _HEARTBEAT_MS
    socket.heartbeat_timeout = _HEARTBEAT_TIMEOUT_MS
