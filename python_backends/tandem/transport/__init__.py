"""Transports by name, imported when chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tandem.errors import ConfigError
from tandem.transport.base import Transport


@dataclass(frozen=True)
class TransportOptions:
    """``device``: where the slab is. ``host``: IP address under which engines of other hosts
    reach this one.
    """

    device: str = "cpu"  # cpu | cuda:N
    host: str = "127.0.0.1"
    nixl_backend: str = "UCX"


def create_transport(name: str, options: TransportOptions | None = None) -> Transport:
    """Raises ``ConfigError`` if there is no such transport, here, for that device or anywhere."""
    if name not in _TRANSPORTS:
        raise ConfigError(f"transport = {name!r}: known are: {', '.join(_TRANSPORTS)}")
    options = options or TransportOptions()
    kind = options.device.partition(":")[0]
    if kind != (needed := "cuda" if name == "cuda_ipc" else "cpu"):
        raise ConfigError(f"transport = {name!r}: needs device = {needed}, not {kind}")
    return _TRANSPORTS[name](options)


def _shm(options: TransportOptions) -> Transport:
    from tandem.transport.shm import ShmTransport

    return ShmTransport()


def _cuda_ipc(options: TransportOptions) -> Transport:
    from tandem.transport.cuda_ipc import CudaIpcTransport
    from tandem.transport.cuda_runtime import load_runtime

    return CudaIpcTransport(load_runtime(), int(options.device.removeprefix("cuda:")))


def _nixl(options: TransportOptions) -> Transport:
    from tandem.transport.nixl import NixlOptions, NixlTransport

    return NixlTransport(NixlOptions(host=options.host, backend=options.nixl_backend))


_TRANSPORTS: dict[str, Callable[[TransportOptions], Transport]] = {
    "shm": _shm,
    "cuda_ipc": _cuda_ipc,
    "nixl": _nixl,
}
