"""Where the engines reach an orchestrator: on this host, or from everywhere with the secret."""

from __future__ import annotations

import hmac
from pathlib import Path
from typing import Any, Protocol

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils import z85

from tandem.config import Deployment
from tandem.stream_address import StreamKeys, prepare_tcp, socket_path, tcp_name


class Listener(Protocol):
    def bind(self, context: zmq.asyncio.Context, socket: zmq.Socket[Any]) -> str:
        """Returns what the orchestrator puts into ``reply_to``. On the event loop."""
        ...

    def close(self) -> None:
        """After the socket is closed, before its context ends."""
        ...


def listener_for(deployment: Deployment, name: str) -> Listener:
    if not deployment.stream_host:
        return IpcListener(deployment.runtime_dir, name)
    keys = StreamKeys.derive(deployment.secret)
    return TcpListener(deployment.runtime_dir, name, deployment.stream_host, keys)


class IpcListener:
    """A socket in the runtime directory, which only this user can enter."""

    def __init__(self, runtime_dir: str, name: str) -> None:
        self._path = Path(socket_path(runtime_dir, name))
        self._name = name

    def bind(self, context: zmq.asyncio.Context, socket: zmq.Socket[Any]) -> str:
        socket.bind(f"ipc://{self._path}")
        return self._name

    def close(self) -> None:
        self._path.unlink(missing_ok=True)


class TcpListener:
    """A free port of ``host``. In the runtime directory a file shows that there is an orchestrator,
    as a socket would: a drain waits for it.
    """

    def __init__(self, runtime_dir: str, name: str, host: str, keys: StreamKeys) -> None:
        self._path = Path(socket_path(runtime_dir, name))
        self._host = host
        self._keys = keys

    def bind(self, context: zmq.asyncio.Context, socket: zmq.Socket[Any]) -> str:
        self._authenticator = AsyncioAuthenticator(context)
        self._authenticator.start()  # without it, every client that knows the public key is let in
        self._authenticator.configure_curve_callback("*", _OnlyEngines(self._keys))
        socket.curve_server = True
        socket.curve_secretkey = self._keys.orchestrator_secret
        prepare_tcp(socket, self._host)
        host = f"[{self._host}]" if ":" in self._host else self._host
        port = socket.bind_to_random_port(f"tcp://{host}")
        self._path.touch()
        return tcp_name(self._host, port)

    def close(self) -> None:
        self._authenticator.stop()
        self._path.unlink(missing_ok=True)


class _OnlyEngines:
    """A credentials provider of pyzmq."""

    def __init__(self, keys: StreamKeys) -> None:
        self._engine_public = z85.decode(keys.engine_public)

    def callback(self, domain: str, key: bytes) -> bool:
        return hmac.compare_digest(z85.decode(key), self._engine_public)
