"""From responses to chunks and the completion, without I/O: sync and async share it."""

from __future__ import annotations

from itertools import chain
from typing import TypeVar

import msgspec

from tandem_client.errors import (
    ConnectionFailed,
    IncompleteStream,
    ServerError,
    TandemClientError,
)
from tandem_client.response import Response, Timings

_T = TypeVar("_T")


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer. ``finish_reason`` is "stop", "length" or "timeout".

    ``output_ids`` and ``logprobs`` (one per output token) are None unless asked for.
    """

    text: str
    finish_reason: str
    num_input_tokens: int
    num_output_tokens: int
    output_ids: tuple[int, ...] | None
    logprobs: tuple[float, ...] | None
    timings: Timings


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of a stream. The last one, and no other, carries the ``completion``."""

    text: str
    output_ids: tuple[int, ...] | None
    logprobs: tuple[float, ...] | None
    completion: Completion | None = None

    @property
    def finish_reason(self) -> str | None:
        return self.completion.finish_reason if self.completion else None


class Assembler:
    """Collects the responses of one request and checks that exactly one of them is final."""

    def __init__(self) -> None:
        self._num_responses = 0
        self._texts: list[str] = []
        self._output_ids: list[tuple[int, ...]] = []
        self._logprobs: list[tuple[float, ...]] = []
        self.completion: Completion | None = None

    def add(self, response: Response) -> Chunk | None:
        """The chunk this response makes; None if it holds nothing a user could see."""
        self._num_responses += 1
        if response == _EMPTY:
            return None
        if self.completion is not None:
            raise ServerError("the server sent a response after the final one")
        self._texts.append(response.text)
        if response.output_ids is not None:
            self._output_ids.append(response.output_ids)
        if response.logprobs is not None:
            self._logprobs.append(response.logprobs)
        if response.finish_reason is not None:
            self.completion = self._complete(response, response.finish_reason)
        return Chunk(
            text=response.text,
            output_ids=response.output_ids,
            logprobs=response.logprobs,
            completion=self.completion,
        )

    def end(self) -> None:
        """The stream ended by itself: that is an error unless the final response was there."""
        if self.completion is None:
            raise IncompleteStream(
                f"the stream ended after {self._num_responses} responses without the final one"
            )

    def fail(self, error: TandemClientError) -> None:
        """The stream broke: raise what this means to a user; nothing once the answer is whole."""
        if self.completion is not None:
            return
        if isinstance(error, ConnectionFailed) and self._num_responses:
            raise IncompleteStream(
                f"the connection was lost after {self._num_responses} responses: {error}"
            ) from error
        raise error

    def _complete(self, final: Response, finish_reason: str) -> Completion:
        if final.num_input_tokens is None or final.num_output_tokens is None:
            raise ServerError("the final response lacks num_input_tokens or num_output_tokens")
        return Completion(
            text="".join(self._texts),
            finish_reason=finish_reason,
            num_input_tokens=final.num_input_tokens,
            num_output_tokens=final.num_output_tokens,
            output_ids=_joined(self._output_ids),
            logprobs=_joined(self._logprobs),
            timings=final.timings or Timings(),
        )


_EMPTY = Response()


def _joined(lists: list[tuple[_T, ...]]) -> tuple[_T, ...] | None:
    return tuple(chain.from_iterable(lists)) if lists else None
