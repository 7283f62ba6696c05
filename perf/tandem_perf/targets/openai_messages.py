"""OpenAI's completions API as bodies and events; no I/O.

Prompts of token ids go out as the list of ints that the completions API allows, so their length
is exact. ``ignore_eos`` and ``continuous_usage_stats`` are extensions that vLLM and SGLang know;
``continuous_usage_stats`` tells how many tokens each chunk holds.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tandem_perf.requests import BenchRequest
from tandem_perf.targets.base import Answer, TargetError

DONE = b"[DONE]"
_MAX_QUOTED = 300


class Delta(msgspec.Struct, frozen=True):
    content: str | None = None


class Choice(msgspec.Struct, frozen=True):
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Event(msgspec.Struct, frozen=True):
    choices: tuple[Choice, ...] = ()
    usage: Usage | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(Event).decode


def path_of(request: BenchRequest) -> str:
    return "/v1/completions" if request.messages is None else "/v1/chat/completions"


def body_of(request: BenchRequest, model: str) -> bytes:
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": request.max_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "ignore_eos": request.ignore_eos,
    }
    if request.messages is not None:
        body["messages"] = request.messages
    elif request.input_ids is not None:
        body["prompt"] = request.input_ids.tolist()
    else:
        body["prompt"] = request.text
    return msgspec.json.encode(body)


class AnswerReader:
    """Turns the events of one stream into token counts and, at the end, the answer."""

    def __init__(self) -> None:
        self._finish_reason: str | None = None
        self._usage: Usage | None = None
        self._num_tokens = 0
        self._is_done = False

    def tokens_in(self, data: bytes) -> int:
        """How many tokens this event brought. Raises TargetError for an error event."""
        if data == DONE:
            self._is_done = True
            return 0
        event = _event(data)
        has_text = False
        for choice in event.choices:
            has_text = has_text or bool(choice.text or choice.delta and choice.delta.content)
            self._finish_reason = choice.finish_reason or self._finish_reason
        counted = None
        if event.usage is not None:
            self._usage = event.usage
            counted = event.usage.completion_tokens
        # Counts of the last chunk (no choices) say nothing about when its tokens came.
        if not event.choices:
            return 0
        new = int(has_text) if counted is None else counted - self._num_tokens
        self._num_tokens += max(0, new)
        return max(0, new)

    def answer(self) -> Answer:
        """Raises TargetError if the stream was cut off."""
        if not self._is_done and self._finish_reason is None:
            raise TargetError(f"the stream ended after {self._num_tokens} tokens without an end")
        usage = self._usage or Usage()
        return Answer(
            finish_reason=self._finish_reason,
            prompt_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
        )


def error_text(status: int, body: bytes) -> str:
    try:
        return f"HTTP {status}: {_message(msgspec.json.decode(body)['error'])}"
    except (msgspec.MsgspecError, KeyError, TypeError):
        return f"HTTP {status}: {body[:_MAX_QUOTED].decode(errors='replace')}"


def _event(data: bytes) -> Event:
    try:
        event = _decode_event(data)
    except msgspec.MsgspecError as error:
        quoted = data[:_MAX_QUOTED].decode(errors="replace")
        raise TargetError(f"malformed event ({error}): {quoted}") from error
    if event.error is not None:
        raise TargetError(_message(event.error))
    return event


def _message(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)
