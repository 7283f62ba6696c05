"""Triton's generate_stream: the client's protocol code over a pool made for load."""

from __future__ import annotations

from tandem_client import TandemClientError
from tandem_client.assembly import Assembler
from tandem_client.transports.http_messages import ResponseDecoder, generate_path, request_body
from tandem_perf.requests import BenchRequest
from tandem_perf.targets.base import Answer, OnTokens, TargetError, TargetOptions
from tandem_perf.targets.http_pool import HttpError, HttpPool, HttpResponse
from tandem_perf.targets.triton_grpc import answer_from, generate_request

_MAX_CONNECT_S = 30.0


class TritonHttpTarget:
    def __init__(self, options: TargetOptions) -> None:
        headers = {"content-type": "application/json", "accept": "*/*"}
        try:
            self._pool = HttpPool(options.url, headers, min(_MAX_CONNECT_S, options.timeout_s))
        except HttpError as error:
            raise TargetError(str(error)) from error
        self._model = options.model or "llm"

    async def send(self, request: BenchRequest, on_tokens: OnTokens) -> Answer:
        message = generate_request(request)
        path, body = generate_path(self._model, message), request_body(message)
        try:
            async with self._pool.request("POST", path, body) as response:
                return await _read(response, on_tokens)
        except TandemClientError as error:
            raise TargetError(f"{type(error).__name__}: {error}") from error
        except HttpError as error:
            raise TargetError(str(error)) from error

    async def aclose(self) -> None:
        self._pool.close()


async def _read(response: HttpResponse, on_tokens: OnTokens) -> Answer:
    decoder = ResponseDecoder(response.status, is_event_stream=True)
    assembler = Assembler()
    async for piece in response.pieces():
        for part in decoder.feed(piece):
            chunk = assembler.add(part)
            if chunk is not None and chunk.output_ids:
                on_tokens(len(chunk.output_ids))
    for _ in decoder.end():  # raises what an error status means
        pass
    assembler.end()
    assert assembler.completion is not None
    return answer_from(assembler.completion)
