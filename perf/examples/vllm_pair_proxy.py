"""Sends each completion to a prefill and then to a decode engine of vLLM (NixlConnector).

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
REMOTE_DECODE = {
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
    headers = {"X-Request-Id": str(uuid4())}
    first = {**body, "stream": False, "max_tokens": 1, "kv_transfer_params": REMOTE_DECODE}
    first.pop("stream_options", None)
    for limit in ("max_completion_tokens", "min_tokens"):
        first.pop(limit, None)
    prefilled = await engines["prefill"].post(request.url.path, json=first, headers=headers)
    if prefilled.status_code != 200:
        return Response(prefilled.content, prefilled.status_code, media_type="application/json")
    body["kv_transfer_params"] = prefilled.json().get("kv_transfer_params") or {}
    stream = decoded(request.url.path, body, headers)
    return StreamingResponse(stream, media_type="text/event-stream")


async def decoded(path: str, body: dict[str, Any], headers: dict[str, str]) -> AsyncIterator[bytes]:
    async with engines["decode"].stream("POST", path, json=body, headers=headers) as answer:
        async for piece in answer.aiter_raw():
            yield piece


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
