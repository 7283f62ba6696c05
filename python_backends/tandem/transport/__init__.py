"""Transports by name, imported when chosen."""

from __future__ import annotations

from tandem.errors import ConfigError
from tandem.transport.base import Transport


def create_transport(name: str) -> Transport:
    if name == "shm":
        from tandem.transport.shm import ShmTransport

        return ShmTransport()
    raise ConfigError(f"transport = {name!r}: known are: shm")
