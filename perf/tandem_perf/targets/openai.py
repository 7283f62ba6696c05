"""Any server with OpenAI's completions API: vLLM, SGLang, and many others."""

from __future__ import annotations

import msgspec

from tandem_perf.requests import BenchRequest
from tandem_perf.targets.base import Answer, OnTokens, TargetError, TargetOptions
from tandem_perf.targets.http_pool import HttpError, HttpPool, HttpResponse
from tandem_perf.targets.openai_messages import AnswerReader, body_of, error_text, path_of
from tandem_perf.targets.server_sent_events import EventSplitter

_MAX_CONNECT_S = 30.0


class OpenAITarget:
    def __init__(self, options: TargetOptions) -> None:
        headers = {"content-type": "application/json", "accept": "*/*"}
        if options.api_key:
            headers["authorization"] = f"Bearer {options.api_key}"
        url = options.url.rstrip("/").removesuffix("/v1")
        try:
            self._pool = HttpPool(url, headers, min(_MAX_CONNECT_S, options.timeout_s))
        except HttpError as error:
            raise TargetError(str(error)) from error
        self._model = options.model

    async def send(self, request: BenchRequest, on_tokens: OnTokens) -> Answer:
        try:
            body = body_of(request, self._model or await self._only_model())
            async with self._pool.request("POST", path_of(request), body) as response:
                if response.status != 200:
                    raise TargetError(error_text(response.status, await response.body()))
                return await _read(response, on_tokens)
        except HttpError as error:
            raise TargetError(str(error)) from error

    async def aclose(self) -> None:
        self._pool.close()

    async def _only_model(self) -> str:
        async with self._pool.request("GET", "/v1/models") as response:
            body = await response.body()
        try:
            names = [str(model["id"]) for model in msgspec.json.decode(body)["data"]]
        except (msgspec.MsgspecError, KeyError, TypeError) as error:
            raise TargetError(f"/v1/models: HTTP {response.status}, no list of models") from error
        if len(names) != 1:
            raise TargetError(f"--model: choose one of {', '.join(names) or 'no models'}")
        self._model = names[0]
        return self._model


async def _read(response: HttpResponse, on_tokens: OnTokens) -> Answer:
    splitter, reader = EventSplitter(), AnswerReader()
    async for piece in response.pieces():
        for data in splitter.feed(piece):
            if num_tokens := reader.tokens_in(data):
                on_tokens(num_tokens)
    return reader.answer()
