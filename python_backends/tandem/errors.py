"""One hierarchy for every fault of a user or of a peer.

::

    TandemError
    ├── InvalidRequest         INVALID_ARG   the request is wrong; names the field and the limit
    │   └── InvalidHandle      INVALID_ARG   forged, truncated, foreign or expired KV handle
    ├── Unavailable            UNAVAILABLE   no worker can serve this now; may be retried
    │   ├── EngineDied         UNAVAILABLE   the engine that held the sequence is gone
    │   └── ShuttingDown       UNAVAILABLE   the server is stopping; nothing is tried again here
    ├── PullFailed             UNAVAILABLE   the KV cache could not be moved; re-prefill
    │   ├── FenceBroken        UNAVAILABLE   the blocks changed owner before or during the pull
    │   └── PullTimedOut       UNAVAILABLE   and may still write; a PullFailed to other processes
    ├── RequestCancelled       CANCELLED     the client went away
    ├── EngineFault            INTERNAL      an exception inside an engine
    └── ConfigError            (start-up)    a setting is unknown or out of range

An ``assert`` is a bug of ours and never reaches a user as such.
"""

from __future__ import annotations

from concurrent.futures import Future
from enum import StrEnum


class ErrorCode(StrEnum):
    """Names of Triton's error codes (TRITONSERVER_Error_Code)."""

    INVALID_ARG = "INVALID_ARG"
    UNAVAILABLE = "UNAVAILABLE"
    CANCELLED = "CANCELLED"
    INTERNAL = "INTERNAL"


class TandemError(Exception):
    """Base of all; ``code`` is the Triton error code a client sees."""

    code = ErrorCode.INTERNAL


class InvalidRequest(TandemError):
    code = ErrorCode.INVALID_ARG

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class InvalidHandle(InvalidRequest):
    def __init__(self, problem: str) -> None:
        super().__init__("handle", problem)


class Unavailable(TandemError):
    code = ErrorCode.UNAVAILABLE


class EngineDied(Unavailable):
    pass


class ShuttingDown(Unavailable):
    pass


class PullFailed(TandemError):
    code = ErrorCode.UNAVAILABLE


class FenceBroken(PullFailed):
    pass


class PullTimedOut(PullFailed):
    """The destination blocks must not be used for anything until ``settled`` is done."""

    def __init__(self, problem: str, settled: Future[None]) -> None:
        super().__init__(problem)
        self.settled = settled


class RequestCancelled(TandemError):
    code = ErrorCode.CANCELLED


class EngineFault(TandemError):
    code = ErrorCode.INTERNAL


class ConfigError(TandemError):
    pass


_WIRE_NAMES = {
    cls.__name__: cls
    for cls in (
        Unavailable,
        EngineDied,
        ShuttingDown,
        PullFailed,
        FenceBroken,
        RequestCancelled,
        EngineFault,
    )
}


def to_wire(error: BaseException) -> tuple[str, str]:
    """``(class name, message)`` of an error, for a message between processes."""
    if isinstance(error, InvalidHandle):
        return "InvalidHandle", str(error).removeprefix("handle: ")
    if isinstance(error, InvalidRequest):
        return "InvalidRequest", str(error)
    for kind in type(error).__mro__:
        if kind.__name__ in _WIRE_NAMES:
            return kind.__name__, str(error)
    return "EngineFault", f"{type(error).__name__}: {error}"


def from_wire(name: str, message: str) -> TandemError:
    """The error that ``to_wire`` described; an unknown name becomes an ``EngineFault``."""
    if name == "InvalidHandle":
        return InvalidHandle(message)
    if name == "InvalidRequest":
        field, _, problem = message.partition(": ")
        return InvalidRequest(field, problem)
    return _WIRE_NAMES.get(name, EngineFault)(message)
