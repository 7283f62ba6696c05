"""Addresses of other hosts, as they come from the environment."""

from __future__ import annotations

import ipaddress
from typing import NamedTuple
from urllib.parse import urlsplit

from tandem.errors import ConfigError


class ServerAddress(NamedTuple):
    """Of a Triton server's gRPC; ``host`` is a name or an IP address."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_ip_address(name: str, value: str) -> str:
    """``name`` is the setting that an error names."""
    try:
        address = ipaddress.ip_address(value)
        if address.is_unspecified:
            raise ValueError("it stands for every address")
    except ValueError as error:
        raise ConfigError(f"{name} = {value!r}: not the IP address of a host: {error}") from error
    return str(address)


def parse_servers(name: str, value: str) -> tuple[ServerAddress, ...]:
    """``host:port``, separated by commas; ``grpc://`` may stand before each."""
    texts = [text.strip() for text in value.split(",") if text.strip()]
    return tuple(_parse_server(name, text.removeprefix("grpc://")) for text in texts)


def _parse_server(name: str, text: str) -> ServerAddress:
    try:
        parts = urlsplit(f"grpc://{text}")
        host, port = parts.hostname, parts.port  # the port is checked when it is read
    except ValueError as error:
        raise ConfigError(f"{name}: {text!r}: {error}") from error
    if not host or not port or parts.netloc != text or parts.username is not None:
        raise ConfigError(f"{name}: {text!r} is not host:port")
    return ServerAddress(host, port)
