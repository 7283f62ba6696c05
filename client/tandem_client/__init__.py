"""Client of a Tandem server: ``TandemClient``, ``AsyncTandemClient`` and their errors.

Importing this loads neither grpc nor httpx: the URL decides which of them is needed.
"""

from tandem_client.assembly import Chunk, Completion
from tandem_client.client import AsyncTandemClient, TandemClient
from tandem_client.errors import (
    Cancelled,
    ConnectionFailed,
    DeadlineExceeded,
    IncompleteStream,
    InvalidRequest,
    ServerError,
    TandemClientError,
    Unavailable,
)
from tandem_client.request import GenerateParams, GenerateRequest
from tandem_client.response import Timings
from tandem_client.stream import AsyncStream, Stream

__all__ = [
    "AsyncStream",
    "AsyncTandemClient",
    "Cancelled",
    "Chunk",
    "Completion",
    "ConnectionFailed",
    "DeadlineExceeded",
    "GenerateParams",
    "GenerateRequest",
    "IncompleteStream",
    "InvalidRequest",
    "ServerError",
    "Stream",
    "TandemClient",
    "TandemClientError",
    "Timings",
    "Unavailable",
]
