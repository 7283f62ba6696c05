"""The seam between the orchestrator and whoever carries its responses to the client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tandem.errors import TandemError
from tandem.types import FinishReason


@dataclass(frozen=True)
class Response:
    """New text of a request, and its tokens where the client asked for them."""

    text: str
    output_ids: list[int] | None = None
    logprobs: list[float] | None = None


@dataclass(frozen=True)
class Usage:
    """What only the final response carries; None is what the client did not want."""

    finish_reason: FinishReason | None
    num_input_tokens: int | None
    num_output_tokens: int | None
    timings: dict[str, str | int | float] | None


class Responder(Protocol):
    """Gets any number of ``send``, then exactly one of ``send_final`` and ``fail``."""

    def send(self, response: Response) -> None: ...
    def send_final(self, response: Response, usage: Usage) -> None: ...
    def fail(self, error: TandemError) -> None: ...
    def is_cancelled(self) -> bool:
        """Whether the client went away; costs about 250 µs on Triton."""
        ...
