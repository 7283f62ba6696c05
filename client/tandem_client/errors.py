"""One hierarchy for everything that can go wrong with a request.

::

    TandemClientError
    ├── InvalidRequest      the request is wrong; the message names the field and the limit
    ├── Unavailable         the server cannot serve this now; may be retried
    ├── Cancelled           the request was cancelled, by the server or by closing the client
    ├── ServerError         a fault inside the server, or an answer that breaks the protocol
    ├── ConnectionFailed    no connection, or it was lost before the first response
    ├── DeadlineExceeded    the client's timeout passed before the final response
    └── IncompleteStream    the stream ended or was cut without the final response
"""

from __future__ import annotations

import re


class TandemClientError(Exception):
    """Base of all; ``str(error)`` is one line fit for a user."""


class InvalidRequest(TandemClientError):
    pass


class Unavailable(TandemClientError):
    @property
    def retry_after_s(self) -> float | None:
        """What an overloaded server thinks it takes; None where it does not say."""
        hint = re.search(r"retry after (\d+(?:\.\d+)?) s", str(self))
        return float(hint[1]) if hint else None


class Cancelled(TandemClientError):
    pass


class ServerError(TandemClientError):
    pass


class ConnectionFailed(TandemClientError):
    pass


class DeadlineExceeded(TandemClientError):
    pass


class IncompleteStream(TandemClientError):
    pass


_BY_CODE: dict[str, type[TandemClientError]] = {
    "INVALID_ARG": InvalidRequest,
    "UNAVAILABLE": Unavailable,
    "CANCELLED": Cancelled,
    "INTERNAL": ServerError,
}
_CODE = re.compile(rf"\[({'|'.join(_BY_CODE)})\]\s*")


def error_from_server(message: str, fallback: type[TandemClientError]) -> TandemClientError:
    """The error a server's message stands for: by its ``[CODE]``, else ``fallback``.

    Triton may put words of its own before the code; they are dropped.
    """
    # Streams carry no status: the code inside the text is all that tells the classes apart.
    match = _CODE.search(message)
    if match is None:
        return fallback(message)
    return _BY_CODE[match[1]](message[match.end() :])
