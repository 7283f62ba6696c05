"""The seam between the load and what is measured: send one request, hear of its tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from tandem_perf.records import ServerTimings
from tandem_perf.requests import BenchRequest

OnTokens = Callable[[int], None]


class TargetError(Exception):
    """The target refused, failed, or broke its protocol; the message is what it said."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What the target said at the end; None where it does not say."""

    finish_reason: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    timings: ServerTimings | None = None


class Target(Protocol):
    """Thousands of ``send`` run at once on one event loop."""

    async def send(self, request: BenchRequest, on_tokens: OnTokens) -> Answer:
        """Calls ``on_tokens(k)`` when a chunk of k ≥ 1 tokens has arrived; returns after the
        final response. Raises TargetError. Cancelling it cancels the request.
        """
        ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """``model``: its name at the target; None is Triton's ``llm``, or the only one that an
    OpenAI server lists. ``api_key`` is for OpenAI servers.
    """

    url: str
    model: str | None = None
    timeout_s: float = 600.0
    api_key: str | None = None
