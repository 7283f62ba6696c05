"""Triton's gRPC stream, through the project's own client."""

from __future__ import annotations

import msgspec

from tandem_client import AsyncTandemClient, Completion, GenerateRequest, TandemClientError
from tandem_client import Timings as ClientTimings
from tandem_perf.records import ServerTimings
from tandem_perf.requests import BenchRequest
from tandem_perf.targets.base import Answer, OnTokens, TargetError, TargetOptions

_GRACE_S = 5.0  # the load's own deadline comes first


class TritonGrpcTarget:
    def __init__(self, options: TargetOptions) -> None:
        try:
            self._client = AsyncTandemClient(
                options.url, model=options.model or "llm", timeout=options.timeout_s + _GRACE_S
            )
        except TandemClientError as error:
            raise TargetError(str(error)) from error

    async def send(self, request: BenchRequest, on_tokens: OnTokens) -> Answer:
        try:
            async with self._client.send(generate_request(request)) as stream:
                async for chunk in stream:
                    if num_tokens := len(chunk.output_ids or ()):
                        on_tokens(num_tokens)
                completion = await stream.result()
        except TandemClientError as error:
            raise TargetError(f"{type(error).__name__}: {error}") from error
        return answer_from(completion)

    async def aclose(self) -> None:
        await self._client.aclose()


def generate_request(request: BenchRequest) -> GenerateRequest:
    ids = request.input_ids
    return GenerateRequest(
        stream=True,
        input_ids=None if ids is None else tuple(ids),
        text_input=request.text,
        messages=request.messages,
        max_tokens=request.max_tokens,
        temperature=0.0,
        ignore_eos=request.ignore_eos,
        return_output_ids=True,  # a chunk a token, also where it adds no text
    )


def answer_from(completion: Completion) -> Answer:
    return Answer(
        finish_reason=completion.finish_reason,
        prompt_tokens=completion.num_input_tokens,
        output_tokens=completion.num_output_tokens,
        timings=_timings(completion.timings),
    )


def _timings(timings: ClientTimings) -> ServerTimings | None:
    given = {name: getattr(timings, name) for name in ServerTimings.__struct_fields__}
    result = msgspec.convert(given, ServerTimings)
    return None if result == ServerTimings() else result
