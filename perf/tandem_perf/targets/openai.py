"""Any server with OpenAI's completions API: vLLM, SGLang, and many others."""

from __future__ import annotations

from itertools import cycle

import httpx
import msgspec

from tandem_perf.requests import BenchRequest
from tandem_perf.targets.base import Answer, OnTokens, TargetError, TargetOptions
from tandem_perf.targets.openai_messages import AnswerReader, body_of, error_text, path_of
from tandem_perf.targets.server_sent_events import EventSplitter

# A pool looks through all its connections for every request: many small pools stay fast.
NUM_POOLS = 64
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=8)


class OpenAITarget:
    def __init__(self, options: TargetOptions) -> None:
        url = options.url.rstrip("/").removesuffix("/v1")
        if not url.startswith(("http://", "https://")):
            raise TargetError(f"url: must be http://… or https://…; got {options.url!r}")
        headers = {"content-type": "application/json"}
        if options.api_key:
            headers["authorization"] = f"Bearer {options.api_key}"
        self._model = options.model
        self._clients = [
            httpx.AsyncClient(
                base_url=url,
                headers=headers,
                limits=_LIMITS,
                verify=url.startswith("https://"),  # loading certificates is slow
                timeout=httpx.Timeout(None, connect=min(30.0, options.timeout_s)),
            )
            for _ in range(NUM_POOLS)
        ]
        self._next_client = cycle(self._clients)

    async def send(self, request: BenchRequest, on_tokens: OnTokens) -> Answer:
        client = next(self._next_client)
        try:
            body = body_of(request, self._model or await self._only_model(client))
            async with client.stream("POST", path_of(request), content=body) as response:
                if response.status_code != 200:
                    raise TargetError(error_text(response.status_code, await response.aread()))
                return await _read(response, on_tokens)
        except httpx.HTTPError as error:
            raise TargetError(f"{type(error).__name__}: {error}".rstrip(": ")) from error

    async def aclose(self) -> None:
        for client in self._clients:
            await client.aclose()

    async def _only_model(self, client: httpx.AsyncClient) -> str:
        response = await client.get("/v1/models")
        try:
            names = [str(model["id"]) for model in msgspec.json.decode(response.content)["data"]]
        except (msgspec.MsgspecError, KeyError, TypeError) as error:
            raise TargetError(f"/v1/models: HTTP {response.status_code}, no list") from error
        if len(names) != 1:
            raise TargetError(f"--model: choose one of {', '.join(names) or 'no models'}")
        self._model = names[0]
        return self._model


async def _read(response: httpx.Response, on_tokens: OnTokens) -> Answer:
    splitter, reader = EventSplitter(), AnswerReader()
    async for piece in response.aiter_raw():
        for data in splitter.feed(piece):
            if num_tokens := reader.tokens_in(data):
                on_tokens(num_tokens)
    return reader.answer()
