"""Transports by URL scheme, imported on demand: grpc and httpx are slow to import."""

from __future__ import annotations

from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from tandem_client.errors import InvalidRequest
from tandem_client.transports.base import AsyncTransport, Endpoint, Transport

_SYNC = {
    "http": "tandem_client.transports.http_sync:HttpTransport",
    "https": "tandem_client.transports.http_sync:HttpTransport",
    "grpc": "tandem_client.transports.grpc_sync:GrpcTransport",
}
_ASYNC = {
    "http": "tandem_client.transports.http_async:AsyncHttpTransport",
    "https": "tandem_client.transports.http_async:AsyncHttpTransport",
    "grpc": "tandem_client.transports.grpc_async:AsyncGrpcTransport",
}


def open_transport(endpoint: Endpoint) -> Transport:
    """Raises InvalidRequest for a URL that no transport understands."""
    transport: Transport = _load(_SYNC, endpoint.url)(endpoint)
    return transport


def open_async_transport(endpoint: Endpoint) -> AsyncTransport:
    """Raises InvalidRequest for a URL that no transport understands."""
    transport: AsyncTransport = _load(_ASYNC, endpoint.url)(endpoint)
    return transport


def _load(targets: dict[str, str], url: str) -> Any:
    try:
        parts = urlsplit(url)
        module, _, name = targets[parts.scheme].partition(":")
        if not parts.hostname or parts.port is None and parts.scheme == "grpc":
            raise ValueError
    except (KeyError, ValueError):
        known = ", ".join(f"{scheme}://host:port" for scheme in targets)
        raise InvalidRequest(f"url: must be one of {known}; got {url!r}") from None
    return getattr(import_module(module), name)
