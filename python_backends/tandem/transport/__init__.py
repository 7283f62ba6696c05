"""Transports by name, imported when chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tandem.errors import ConfigError
from tandem.transport.base import Transport


@dataclass(frozen=True)
class TransportOptions:
    """``host``: IP address under which engines of other hosts reach this one."""

    host: str = "127.0.0.1"
    nixl_backend: str = "UCX"


def create_transport(name: str, options: TransportOptions | None = None) -> Transport:
    """Raises ``ConfigError`` if there is no such transport, here or anywhere."""
    if name not in _TRANSPORTS:
        raise ConfigError(f"transport = {name!r}: known are: {', '.join(_TRANSPORTS)}")
    return _TRANSPORTS[name](options or TransportOptions())


def _shm(options: TransportOptions) -> Transport:
    from tandem.transport.shm import ShmTransport

    return ShmTransport()


def _nixl(options: TransportOptions) -> Transport:
    from tandem.transport.nixl import NixlOptions, NixlTransport

    return NixlTransport(NixlOptions(host=options.host, backend=options.nixl_backend))


_TRANSPORTS: dict[str, Callable[[TransportOptions], Transport]] = {"shm": _shm, "nixl": _nixl}
