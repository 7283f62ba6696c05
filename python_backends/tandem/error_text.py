"""Errors as Triton carries them: a text that begins with the code, in brackets.

Triton adds words of its own around it, and on some ways the text is all that is left.
"""

from __future__ import annotations

import re

from tandem.errors import (
    EngineDied,
    EngineFault,
    ErrorCode,
    InvalidRequest,
    TandemError,
    Unavailable,
)

_ENGINE_DIED = "engine died: "  # tells it from other causes, for which there is one code only
_TEXT = re.compile(rf"\[({'|'.join(ErrorCode)})\] (.*)", re.DOTALL)


def error_text(error: TandemError) -> str:
    cause = _ENGINE_DIED if isinstance(error, EngineDied) else ""
    return f"[{error.code}] {cause}{error}"


def error_from_text(text: str) -> TandemError | None:
    """The error that ``error_text`` described; None if the text is Triton's own."""
    match = _TEXT.search(text)
    if match is None:
        return None
    code, message = match.groups()
    if code == ErrorCode.INVALID_ARG:
        field, _, problem = message.partition(": ")
        return InvalidRequest(field, problem)
    if code == ErrorCode.INTERNAL:
        return EngineFault(message)
    if message.startswith(_ENGINE_DIED):
        return EngineDied(message.removeprefix(_ENGINE_DIED))
    return Unavailable(message)
