"""Sends each completion to a prefill and then to a decode engine of vLLM (NixlConnector).

The prefill engine generates one token, which nobody sees, and keeps the prompt's KV cache; its
answer says where that is. The decode engine gets the same request with that place and pulls.

Runs in vLLM's own environment (fastapi, httpx and uvicorn come with it).
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

app = FastAPI()
engines: dict[str, httpx.AsyncClient] = {}
KEEP_FOR_DECODE = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
    "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip


@app.get("/health")
async def health() -> Response:
    return Response(status_code=200)


@app.get("/v1/models")
async def models() -> Response:
    answer = await engines["decode"].get("/v1/models")
    return Response(answer.content, answer.status_code, media_type="application/json")


@app.post("/v1/completions")
@app.post("/v1/chat/completions")
async def complete(request: Request) -> Response:
    body: dict[str, Any] = await request.json()
    path, headers = request.url.path, {"X-Request-Id": str(uuid4())}
    prefilled = await engines["prefill"].post(path, json=prefill_body(body), headers=headers)
    if prefilled.status_code != 200:
        return Response(prefilled.content, prefilled.status_code, media_type="application/json")
    kv_cache = prefilled.json().get("kv_transfer_params")
    if not kv_cache:  # the decode engine would compute the prompt again, and nobody would notice
        return Response("the prefill engine did not offer its KV cache", status_code=502)
    decode_body = {**body, "kv_transfer_params": kv_cache}
    decode = engines["decode"]
    answer = await decode.send(
        decode.build_request("POST", path, json=decode_body, headers=headers), stream=True
    )
    return StreamingResponse(
        pieces(answer), answer.status_code, media_type=answer.headers["content-type"]
    )


def prefill_body(body: dict[str, Any]) -> dict[str, Any]:
    dropped = {"stream_options", "max_completion_tokens", "min_tokens"}
    kept = {key: value for key, value in body.items() if key not in dropped}
    return {**kept, "stream": False, "max_tokens": 1, "kv_transfer_params": KEEP_FOR_DECODE}


async def pieces(answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for piece in answer.aiter_raw():
            yield piece
    finally:
        await answer.aclose()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prefill", required=True)
    parser.add_argument("--decode", required=True)
    options = parser.parse_args()
    limits = httpx.Limits(max_connections=None)
    for role in ("prefill", "decode"):
        url = getattr(options, role)
        engines[role] = httpx.AsyncClient(base_url=url, timeout=None, limits=limits)
    uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning")
