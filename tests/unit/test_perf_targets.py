"""Targets against servers with known answers; the fake OpenAI server that load tests use, too."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from grpc import StatusCode

from tandem_perf.requests import BenchRequest
from tandem_perf.targets.base import Answer, Target, TargetError, TargetOptions
from tandem_perf.targets.http_pool import HttpPool
from tandem_perf.targets.openai_messages import AnswerReader
from tandem_perf.targets.registry import open_target, target_for
from tandem_perf.targets.server_sent_events import EventSplitter
from test_client_servers import SERVERS, Abort, Cut, Error, FakeTriton, Step, final, token

PATIENCE_S = 30.0  # only a failing test waits this long
REQUEST = BenchRequest(
    request_id="0", length_class="short", max_tokens=3, input_ids=array("i", [5, 6, 7])
)


@dataclass
class FakeOpenAI:
    """Streams ``max_tokens`` tokens of each request: the first after ``first_s``, the others
    ``gap_s`` apart. ``one_at_a_time``: a request waits until the earlier one has its answer.
    ``gate``: no answer before it is set. ``faults``: what to do instead, by the first token id
    of the prompt.
    """

    first_s: float = 0.0
    gap_s: float = 0.0
    tokens_per_chunk: int = 1
    one_at_a_time: bool = False
    has_usage: bool = True
    models: tuple[str, ...] = ("tiny",)
    gate: asyncio.Event | None = None
    faults: dict[int, str] = field(default_factory=dict)
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    num_streams: int = 0
    most_streams: int = 0
    left_early: int = 0
    num_connections: int = 0
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[FakeOpenAI]:
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0, backlog=1000)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                path = head.split(" ", 2)[1]
                if path == "/v1/models":
                    body = json.dumps({"data": [{"id": name} for name in self.models]}).encode()
                    writer.write(_response(200, body))
                    continue
                length = int(head.lower().partition("content-length: ")[2].partition("\r\n")[0])
                self.paths.append(path)
                self.bodies.append(json.loads(await reader.readexactly(length)))
                if not await self._answer(self.bodies[-1], reader, writer):
                    break
        writer.close()

    async def _answer(
        self, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """False if the connection is to end."""
        prompt = body.get("prompt", [0])
        fault = self.faults.get(prompt[0], "")
        if fault == "refuse":
            writer.write(_response(503, b'{"error": {"message": "overloaded"}}'))
            return True
        if fault == "hang":
            await reader.read(1)  # until the client goes away
            self.left_early += 1
            return False
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        self.num_streams += 1
        self.most_streams = max(self.most_streams, self.num_streams)
        try:
            if self.one_at_a_time:
                async with self._turn:
                    await self._stream(body, len(prompt), fault, writer)
            else:
                await self._stream(body, len(prompt), fault, writer)
        finally:
            self.num_streams -= 1
        return fault not in ("cut", "drop")  # drop: close it after the answer

    async def _stream(
        self, body: dict[str, Any], num_prompt: int, fault: str, writer: asyncio.StreamWriter
    ) -> None:
        if self.gate is not None:
            await self.gate.wait()
        await asyncio.sleep(self.first_s)
        wanted, sent = body["max_tokens"], 0
        while sent < wanted:
            if sent and self.gap_s:
                await asyncio.sleep(self.gap_s)
            if sent and fault == "cut":
                return
            if sent and fault == "error":
                writer.write(_event({"error": {"message": "engine died"}}))
                break
            sent = min(wanted, sent + self.tokens_per_chunk)
            choice = {"text": " a", "finish_reason": "length" if sent == wanted else None}
            usage = {"prompt_tokens": num_prompt, "completion_tokens": sent}
            extra = {"usage": usage} if self.has_usage else {}
            writer.write(_event({"choices": [choice], **extra}))
            await writer.drain()
        usage = {"prompt_tokens": num_prompt, "completion_tokens": sent}
        writer.write(_event({"choices": [], "usage": usage}))
        writer.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


def _event(content: object) -> bytes:
    return _chunk(b"data: " + json.dumps(content).encode() + b"\n\n")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _response(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)


async def send(target: Target, request: BenchRequest = REQUEST) -> tuple[list[int], Answer]:
    """The tokens of each chunk, and the answer."""
    chunks: list[int] = []
    try:
        return chunks, await asyncio.wait_for(target.send(request, chunks.append), PATIENCE_S)
    finally:
        await target.aclose()


async def test_openai_sends_token_ids_and_counts_tokens() -> None:
    async with FakeOpenAI().serve() as server:
        chunks, answer = await send(open_target("openai", TargetOptions(url=server.url)))
    assert chunks == [1, 1, 1]
    assert answer == Answer(finish_reason="length", prompt_tokens=3, output_tokens=3)
    assert server.paths == ["/v1/completions"]
    (body,) = server.bodies
    assert body["prompt"] == [5, 6, 7]
    assert body["model"] == "tiny"
    assert body["max_tokens"] == 3
    assert body["temperature"] == 0
    assert body["ignore_eos"] is True
    assert body["stream_options"]["include_usage"] is True


async def test_openai_messages_go_to_the_chat_api() -> None:
    messages = ({"role": "user", "content": "Hi"},)
    request = BenchRequest(request_id="0", length_class="all", max_tokens=1, messages=messages)
    async with FakeOpenAI().serve() as server:
        await send(open_target("openai", TargetOptions(url=server.url, model="m")), request)
    assert server.paths == ["/v1/chat/completions"]
    assert server.bodies[0]["messages"] == list(messages)
    assert server.bodies[0]["model"] == "m"


async def test_openai_chunks_of_several_tokens() -> None:
    async with FakeOpenAI(tokens_per_chunk=2).serve() as server:
        chunks, answer = await send(open_target("openai", TargetOptions(url=server.url)))
    assert chunks == [2, 1]
    assert answer.output_tokens == 3


async def test_openai_without_counts_in_chunks_still_has_the_total() -> None:
    async with FakeOpenAI(tokens_per_chunk=2, has_usage=False).serve() as server:
        chunks, answer = await send(open_target("openai", TargetOptions(url=server.url)))
    assert chunks == [1, 1]
    assert answer.output_tokens == 3


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("refuse", "HTTP 503: overloaded"),
        ("error", "engine died"),
        ("cut", "the connection was closed before the end of the answer"),
    ],
)
async def test_openai_faults_are_errors(fault: str, message: str) -> None:
    async with FakeOpenAI(faults={5: fault}).serve() as server:
        with pytest.raises(TargetError, match=message):
            await send(open_target("openai", TargetOptions(url=server.url)))


async def test_openai_with_several_models_asks_for_one() -> None:
    async with FakeOpenAI(models=("a", "b")).serve() as server:
        with pytest.raises(TargetError, match="--model: choose one of a, b"):
            await send(open_target("openai", TargetOptions(url=server.url)))


async def test_nobody_listens() -> None:
    target = open_target("openai", TargetOptions(url="http://127.0.0.1:9", model="m"))
    with pytest.raises(TargetError, match="cannot connect to 127.0.0.1:9"):
        await send(target)


async def test_a_connection_is_used_again_and_replaced_when_the_server_closed_it() -> None:
    async with FakeOpenAI(faults={9: "drop"}).serve() as server:
        target = open_target("openai", TargetOptions(url=server.url, model="m"))
        dropped = BenchRequest(
            request_id="1", length_class="short", max_tokens=1, input_ids=array("i", [9])
        )
        for request in (REQUEST, REQUEST, dropped, REQUEST):
            async with asyncio.timeout(PATIENCE_S):
                answer = await target.send(request, lambda num_tokens: None)
            assert answer.output_tokens == request.max_tokens
        assert server.num_connections == 2
        await target.aclose()


async def test_a_body_without_length_ends_with_its_connection() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.0 200 OK\r\n\r\nall ")
        await writer.drain()
        writer.write(b"of it")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        pool = HttpPool(f"http://127.0.0.1:{port}/prefix", {}, 5.0)
        async with pool.request("GET", "/x") as response:
            assert await response.body() == b"all of it"
        assert not response.keeps_alive


async def test_something_that_is_not_http_is_an_error() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(TargetError, match="no answer: "):
            options = TargetOptions(url=f"http://127.0.0.1:{port}", model="m")
            await send(open_target("openai", options))


def test_an_answer_that_stops_without_an_end_is_an_error() -> None:
    reader = AnswerReader()
    assert reader.tokens_in(b'{"choices": [{"text": "a"}]}') == 1
    with pytest.raises(TargetError, match="ended after 1 tokens without an end"):
        reader.answer()


def test_an_event_that_is_no_json_is_quoted() -> None:
    with pytest.raises(TargetError, match="malformed event .*: <html>"):
        AnswerReader().tokens_in(b"<html>")


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_in_pieces_of_any_size(size: int) -> None:
    stream = b': ping\n\ndata: {"a": 1}\r\n\r\ndata:two\n\n'
    splitter = EventSplitter()
    pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
    assert [data for piece in pieces for data in splitter.feed(piece)] == [b'{"a": 1}', b"two"]


TRITON_SCRIPT: list[Step] = [
    token("a", output_ids=[11]),
    token("", output_ids=[12, 13]),
    final("b", 4, output_ids=[14]),
]


@pytest.mark.parametrize("scheme", ["grpc", "http"])
async def test_triton_counts_ids_also_without_text(scheme: str) -> None:
    with SERVERS[scheme](FakeTriton(TRITON_SCRIPT)) as fake:
        name = f"triton-{scheme}"
        chunks, answer = await send(open_target(name, TargetOptions(url=fake.url)))
    assert target_for(fake.url) == name
    assert chunks == [1, 2, 1]
    assert (answer.finish_reason, answer.prompt_tokens, answer.output_tokens) == ("stop", 3, 4)
    assert answer.timings is not None
    assert (answer.timings.path, answer.timings.kv_bytes) == ("remote", 1_200_000)
    assert answer.timings.transfer_ms == 0.8
    (sent,) = fake.requests
    values = {name: value[2] if scheme == "grpc" else value for name, value in sent.items()}
    assert values["input_ids"] == [5, 6, 7]
    assert values["ignore_eos"] in (True, [True])
    assert values["return_output_ids"] in (True, [True])


@pytest.mark.parametrize(
    ("scheme", "script", "message"),
    [
        ("grpc", [Error("[UNAVAILABLE] queue is full")], "Unavailable: queue is full"),
        ("http", [token("a"), Error("[INTERNAL] died")], "ServerError: died"),
        ("http", [token("a", output_ids=[1]), Cut()], "closed before the end of the answer"),
        ("http", [token("a", output_ids=[1])], "IncompleteStream: "),
        ("http", [Error("[UNAVAILABLE] full", 503)], "Unavailable: full"),
        ("grpc", [token("a", output_ids=[1])], "IncompleteStream: "),
        ("grpc", [Abort(StatusCode.INTERNAL, "oops")], "ServerError: oops"),
    ],
)
async def test_triton_faults_are_errors(scheme: str, script: list[Step], message: str) -> None:
    with SERVERS[scheme](FakeTriton(script)) as fake:
        with pytest.raises(TargetError, match=message):
            await send(open_target(f"triton-{scheme}", TargetOptions(url=fake.url)))


@pytest.mark.parametrize(
    ("name", "url", "message"),
    [
        ("nope", "http://x", "target 'nope': one of triton-grpc"),
        ("triton-grpc", "http://x:1", "must begin with grpc://"),
        ("triton-http", "grpc://x:1", "must begin with http://"),
        ("triton-grpc", "grpc://x", "host:port"),
        ("openai", "x:8000", "must begin with http://"),
    ],
)
def test_a_wrong_target_is_named(name: str, url: str, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        open_target(name, TargetOptions(url=url))
