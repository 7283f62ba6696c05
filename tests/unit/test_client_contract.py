"""One suite over every protocol, blocking and asyncio, against servers on 127.0.0.1."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import pytest

from tandem_client import (
    AsyncTandemClient,
    Cancelled,
    Chunk,
    Completion,
    ConnectionFailed,
    DeadlineExceeded,
    IncompleteStream,
    InvalidRequest,
    ServerError,
    TandemClient,
    TandemClientError,
    Unavailable,
)
from test_client_servers import (
    PATIENCE_S,
    SERVERS,
    Abort,
    Cut,
    Drip,
    Error,
    FakeTriton,
    Hang,
    Step,
    final,
    http_server,
    token,
)

Serve = Callable[[str, list[Step]], FakeTriton]


@pytest.fixture
def serve() -> Iterator[Serve]:
    with ExitStack() as stack:
        yield lambda scheme, script: stack.enter_context(SERVERS[scheme](FakeTriton(script)))


@pytest.fixture(params=["http", "grpc"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["sync", "async"])
def api(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def stream(api: str, url: str, timeout: float = PATIENCE_S, **params: Any) -> list[Chunk]:
    async def read() -> list[Chunk]:
        async with AsyncTandemClient(url, timeout=timeout) as client:
            return [chunk async for chunk in client.stream("Hi", **params)]

    if api == "async":
        return asyncio.run(read())
    with TandemClient(url, timeout=timeout) as client:
        return list(client.stream("Hi", **params))


def generate(api: str, url: str, timeout: float = PATIENCE_S, **params: Any) -> Completion:
    async def read() -> Completion:
        async with AsyncTandemClient(url, timeout=timeout) as client:
            return await client.generate("Hi", **params)

    if api == "async":
        return asyncio.run(read())
    with TandemClient(url, timeout=timeout) as client:
        return client.generate("Hi", **params)


def test_stream_yields_deltas_and_ends_with_the_completion(
    serve: Serve, scheme: str, api: str
) -> None:
    # U+2028 and U+0085 are line ends to Python's str, but not to an event stream.
    texts = ["Grüße,", " 世界\u2028", "👋\x85"]
    fake = serve(
        scheme,
        [
            token(texts[0], output_ids=[5], logprobs=[-0.5]),
            token(texts[1], output_ids=[6, 7], logprobs=[-1.0, -0.25]),
            final(texts[2], 4, output_ids=[8], logprobs=[-2.0]),
        ],
    )
    chunks = stream(api, fake.url, logprobs=1, return_output_ids=True)
    assert [chunk.text for chunk in chunks] == texts
    assert [chunk.output_ids for chunk in chunks] == [(5,), (6, 7), (8,)]
    assert [chunk.finish_reason for chunk in chunks] == [None, None, "stop"]
    completion = chunks[-1].completion
    assert completion is not None
    assert completion.text == "Grüße, 世界\u2028👋\x85"
    assert completion.output_ids == (5, 6, 7, 8)
    assert completion.logprobs == (-0.5, -1.0, -0.25, -2.0)
    assert (completion.num_input_tokens, completion.num_output_tokens) == (3, 4)
    assert (completion.timings.path, completion.timings.kv_bytes) == ("remote", 1_200_000)


def test_generate_returns_the_whole_answer(serve: Serve, scheme: str, api: str) -> None:
    fake = serve(scheme, [final("Paris", 1, output_ids=[9], finish_reason="length")])
    completion = generate(api, fake.url, return_output_ids=True)
    assert (completion.text, completion.finish_reason) == ("Paris", "length")
    assert (completion.output_ids, completion.logprobs) == ((9,), None)


@pytest.mark.parametrize(
    ("message", "expected", "shown"),
    [
        ("[INVALID_ARG] top_p: must be > 0", InvalidRequest, "top_p: must be > 0"),
        ("model 'llm_0': [UNAVAILABLE] the queue is full", Unavailable, "the queue is full"),
        ("[CANCELLED] shutting down", Cancelled, "shutting down"),
        ("[INTERNAL] KeyError: 3", ServerError, "KeyError: 3"),
    ],
)
def test_errors_are_told_apart_by_the_code_in_the_text(
    serve: Serve,
    scheme: str,
    api: str,
    message: str,
    expected: type[TandemClientError],
    shown: str,
) -> None:
    late = serve(scheme, [token("a"), Error(message)])
    early = serve(scheme, [Error(message)])
    for call, fake in ((stream, late), (stream, early), (generate, early)):
        with pytest.raises(TandemClientError) as caught:
            call(api, fake.url)
        assert type(caught.value) is expected
        assert str(caught.value) == shown


def test_an_overloaded_server_says_when_to_come_again(serve: Serve, scheme: str, api: str) -> None:
    for message, seconds in (("overloaded: 9 wait; retry after 9.3 s", 9.3), ("gone", None)):
        fake = serve(scheme, [Error(f"[UNAVAILABLE] {message}")])
        with pytest.raises(Unavailable) as caught:
            generate(api, fake.url)
        assert caught.value.retry_after_s == seconds


def test_an_error_amid_a_stream_without_a_code_is_the_servers(
    serve: Serve, scheme: str, api: str
) -> None:
    fake = serve(scheme, [token("a"), Error("no code at all")])
    with pytest.raises(ServerError, match="no code at all"):
        stream(api, fake.url)


@pytest.mark.parametrize(
    ("status", "expected"),
    [(400, InvalidRequest), (429, Unavailable), (503, Unavailable), (500, ServerError)],
)
def test_http_status_decides_without_a_code(
    serve: Serve, api: str, status: int, expected: type[TandemClientError]
) -> None:
    fake = serve("http", [Error("unknown model", status)])
    for call in (stream, generate):
        with pytest.raises(expected) as caught:
            call(api, fake.url)
        assert str(caught.value) == "unknown model"


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest),
        (grpc.StatusCode.UNAVAILABLE, ConnectionFailed),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Unavailable),
        (grpc.StatusCode.CANCELLED, Cancelled),
        (grpc.StatusCode.NOT_FOUND, ServerError),
    ],
)
def test_grpc_status_decides_without_a_code(
    serve: Serve, api: str, status: grpc.StatusCode, expected: type[TandemClientError]
) -> None:
    fake = serve("grpc", [Abort(status, "some reason")])
    with pytest.raises(expected, match="some reason"):
        stream(api, fake.url)


def test_a_grpc_connection_lost_amid_the_stream_is_incomplete(serve: Serve, api: str) -> None:
    # gRPC reports a closed socket with this status; a code in the text still takes precedence.
    fake = serve("grpc", [token("a"), Abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")])
    with pytest.raises(IncompleteStream, match="after 1 responses"):
        stream(api, fake.url)
    fake = serve("grpc", [token("a"), Abort(grpc.StatusCode.UNAVAILABLE, "[UNAVAILABLE] busy")])
    with pytest.raises(Unavailable, match="busy"):
        stream(api, fake.url)


def test_a_stream_without_the_final_response_is_incomplete(
    serve: Serve, scheme: str, api: str
) -> None:
    fake = serve(scheme, [token("a"), token("b")])
    with pytest.raises(IncompleteStream, match="after 2 responses"):
        stream(api, fake.url)


def test_a_connection_cut_amid_the_stream_is_incomplete(serve: Serve, api: str) -> None:
    fake = serve("http", [token("a"), Cut()])
    with pytest.raises(IncompleteStream, match="after 1 responses"):
        stream(api, fake.url)


def test_a_connection_lost_after_the_final_response_harms_nothing(serve: Serve, api: str) -> None:
    fake = serve("http", [final("a", 1), Cut()])
    assert [chunk.text for chunk in stream(api, fake.url)] == ["a"]


def test_a_response_after_the_final_one_is_an_error(serve: Serve, scheme: str, api: str) -> None:
    fake = serve(scheme, [final("a", 1), final("b", 1)])
    with pytest.raises(ServerError, match="after the final one"):
        stream(api, fake.url)


def test_the_deadline_is_for_the_whole_answer_and_cancels_it(
    serve: Serve, scheme: str, api: str
) -> None:
    fake = serve(scheme, [token("a"), Hang()])
    with pytest.raises(DeadlineExceeded, match="within 0.2 s"):
        stream(api, fake.url, timeout=0.2)
    assert fake.client_left.wait(PATIENCE_S)


def test_steady_tokens_do_not_put_off_the_deadline(serve: Serve, scheme: str, api: str) -> None:
    fake = serve(scheme, [Drip()])
    with pytest.raises(DeadlineExceeded, match="within 0.2 s"):
        stream(api, fake.url, timeout=0.2)
    assert fake.client_left.wait(PATIENCE_S)


def test_the_deadline_holds_before_the_first_response(serve: Serve, scheme: str, api: str) -> None:
    fake = serve(scheme, [Hang()])
    with pytest.raises(DeadlineExceeded, match="within 0.2 s"):
        generate(api, fake.url, timeout=0.2)
    assert fake.client_left.wait(PATIENCE_S)


def test_no_server_is_a_failed_connection(scheme: str, api: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    for call in (stream, generate):
        with pytest.raises(ConnectionFailed, match=f"127.0.0.1:{port}"):
            call(api, f"{scheme}://127.0.0.1:{port}")


def test_a_server_that_hangs_up_is_a_failed_connection(scheme: str, api: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"
        listener.settimeout(PATIENCE_S)
        hang_up = threading.Thread(target=lambda: listener.accept()[0].close())
        hang_up.start()
        with pytest.raises(ConnectionFailed):
            stream(api, url)
        hang_up.join()


def test_leaving_the_loop_cancels_the_request(serve: Serve, scheme: str) -> None:
    fake = serve(scheme, [token("a"), Hang()])
    with TandemClient(fake.url) as client:
        for chunk in client.stream("Hi"):
            assert chunk.text == "a"
            break
        assert fake.client_left.wait(PATIENCE_S)


def test_leaving_the_context_cancels_the_request(serve: Serve, scheme: str) -> None:
    fake = serve(scheme, [token("a"), Hang()])
    with TandemClient(fake.url) as client:
        with client.stream("Hi") as answer:
            assert next(answer).text == "a"
        assert fake.client_left.wait(PATIENCE_S)
        with pytest.raises(IncompleteStream, match="closed before"):
            answer.result()


@pytest.mark.parametrize("way", ["break", "context", "task"])
async def test_leaving_cancels_the_request_async(serve: Serve, scheme: str, way: str) -> None:
    fake = serve(scheme, [token("a"), Hang()])
    started = asyncio.Event()

    async def read(client: AsyncTandemClient) -> None:
        async for chunk in client.stream("Hi"):
            assert chunk.text == "a"
            started.set()
            if way == "break":
                break

    async with AsyncTandemClient(fake.url) as client:
        if way == "context":
            async with client.stream("Hi") as answer:
                assert (await anext(answer)).text == "a"
        else:
            task = asyncio.create_task(read(client))
            await started.wait()
            if way == "task":
                task.cancel()
            await asyncio.wait([task])
            assert task.cancelled() == (way == "task")
        assert await asyncio.to_thread(fake.client_left.wait, PATIENCE_S)


def test_one_client_carries_many_streams_at_once(serve: Serve, scheme: str) -> None:
    fake = serve(scheme, [token("a"), final("b", 2)])
    with TandemClient(fake.url) as client:
        streams = [client.stream(f"{i}") for i in range(3)]
        assert [next(answer).text for answer in streams] == ["a"] * 3
        assert [answer.result().text for answer in streams] == ["ab"] * 3


async def test_one_async_client_carries_many_streams_at_once(serve: Serve, scheme: str) -> None:
    fake = serve(scheme, [token("a"), final("b", 2)])
    async with AsyncTandemClient(fake.url) as client:
        answers = await asyncio.gather(*(client.stream("Hi").result() for _ in range(3)))
        assert [answer.text for answer in answers] == ["ab"] * 3


def test_readiness_needs_the_server_and_the_model(serve: Serve, scheme: str, api: str) -> None:
    def is_ready(url: str, model: str) -> bool:
        async def ask() -> bool:
            async with AsyncTandemClient(url, model=model) as client:
                return await client.is_ready()

        if api == "async":
            return asyncio.run(ask())
        with TandemClient(url, model=model) as client:
            return client.is_ready()

    fake = serve(scheme, [])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closed_port = listener.getsockname()[1]
    assert is_ready(fake.url, "llm")
    assert not is_ready(fake.url, "other")
    assert not is_ready(f"{scheme}://127.0.0.1:{closed_port}", "llm")


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://host:1", "grpc://host", "http://", "http://host:port"]
)
def test_a_bad_url_is_refused(url: str) -> None:
    for client in (TandemClient, AsyncTandemClient):
        with pytest.raises(InvalidRequest, match="url: must be one of"):
            client(url)


def test_a_malformed_event_is_a_server_error() -> None:
    with http_server(FakeTriton([{"text_output": 3}])) as fake:
        with pytest.raises(ServerError, match="malformed response"):
            stream("sync", fake.url)
