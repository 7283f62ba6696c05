"""Streams of the real server: what is shown, when, and that each one ends exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from oracle import Oracle, random_prompt
from running_server import held_blocks, metric, serve, wait_until
from tandem_cli.server import TandemServer
from tandem_client import AsyncTandemClient, Completion, TandemClient
from triton_calls import ask, infer_request, stream_infer, tensors_of

REPLACEMENT = "\ufffd"
SCHEMES = ("http", "grpc")


@dataclass(frozen=True)
class Served:
    server: TandemServer
    oracle: Oracle
    known: dict[str, Completion] = field(default_factory=dict)

    def url(self, scheme: str) -> str:
        return self.server.http_url if scheme == "http" else f"grpc://{self.server.grpc_address}"

    def prompt(self, seed: int, length: int = 20) -> list[int]:
        return random_prompt(length, self.oracle.tokenizer.vocab_size, seed)

    def whole(self, **params: Any) -> Completion:
        """The answer without a stream; asked for once."""
        if repr(params) not in self.known:
            with TandemClient(self.url("grpc")) as client:
                self.known[repr(params)] = client.generate(return_output_ids=True, **params)
        return self.known[repr(params)]

    def pieces(self, scheme: str, is_async: bool, **params: Any) -> list[str]:
        """The text of every chunk of one stream."""
        if is_async:
            return asyncio.run(self._pieces(scheme, params))
        with TandemClient(self.url(scheme)) as client, client.stream(**params) as stream:
            return [chunk.text for chunk in stream]

    async def _pieces(self, scheme: str, params: dict[str, Any]) -> list[str]:
        async with self.client(scheme) as client, client.stream(**params) as stream:
            return [chunk.text async for chunk in stream]

    @asynccontextmanager
    async def client(self, scheme: str) -> AsyncIterator[AsyncTandemClient]:
        async with AsyncTandemClient(self.url(scheme)) as client:
            yield client


@pytest.fixture(scope="module")
def byte_level(tiny_server: TandemServer, tiny_model_dir: Callable[..., Path]) -> Served:
    return Served(tiny_server, Oracle(tiny_model_dir("llama")))


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    """By the kind of tokenizer, or smollm2; one server after the other."""
    if request.param == "byte_level":
        yield request.getfixturevalue("byte_level")
        return
    if request.param == "smollm2":
        directory = request.getfixturevalue("smollm2")
    else:
        directory = request.getfixturevalue("tiny_model_dir")("llama", request.param)
    settings = ("max_model_len=512", "kv_cache_mb=64")
    with serve(directory, policy="auto", settings=settings) as server:
        yield Served(server, Oracle(directory))
        wait_until(lambda: held_blocks(server) == 0)


on_tiny_models = pytest.mark.parametrize("served", ["byte_level", "sentencepiece"], indirect=True)
on_smollm2 = pytest.mark.parametrize("served", ["smollm2"], indirect=True)


@pytest.fixture(params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# ---- what is shown -------------------------------------------------------------------------


@on_tiny_models
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_pieces_of_random_tokens_join_to_the_text(
    served: Served, scheme: str, is_async: bool
) -> None:
    """Most bytes of a random model are broken UTF-8, and some are not."""
    for seed in range(4):
        params = {
            "input_ids": served.prompt(seed),
            "max_tokens": 96,
            "temperature": 2.0,
            "seed": seed,
            "ignore_eos": True,
        }
        whole = served.whole(**params)
        assert whole.output_ids is not None
        assert whole.text == served.oracle.text(whole.output_ids)
        assert REPLACEMENT in whole.text
        pieces = served.pieces(scheme, is_async, **params)
        assert len(pieces) > 20
        assert "".join(pieces) == whole.text


REPEATED = "Repeat this text exactly: 👋🏽 你好世界 🎉 こんにちは 😀 한국어 naïve"


@on_smollm2
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_emoji_and_cjk_arrive_whole(served: Served, scheme: str, is_async: bool) -> None:
    params = {"messages": [{"role": "user", "content": REPEATED}], "max_tokens": 48}
    whole = served.whole(**params)
    assert whole.output_ids is not None
    assert whole.text == served.oracle.text(whole.output_ids, whole.finish_reason)
    assert sum(ord(char) > 0x3000 for char in whole.text) > 3, "the test's premise"
    pieces = served.pieces(scheme, is_async, **params)
    assert "".join(pieces) == whole.text
    # A character of several tokens comes in one piece; it never shows as a broken one first.
    if REPLACEMENT not in whole.text:
        assert not any(REPLACEMENT in piece for piece in pieces)


@on_tiny_models
def test_a_stop_string_across_tokens_never_leaks(served: Served, scheme: str) -> None:
    params = {
        "input_ids": served.prompt(1),
        "max_tokens": 64,
        "temperature": 2.0,
        "seed": 5,
        "ignore_eos": True,
    }
    text = served.whole(**params).text
    candidates = [text[i : i + 3] for i in range(2, len(text) - 3)]  # a token is 1 to 5 long
    stops = [stop for stop in candidates if REPLACEMENT not in stop]
    assert len(stops) >= 3, "the test's premise"
    for stop in stops[:: len(stops) // 3]:
        expected = text[: text.index(stop)]
        answer = served.whole(**params, stop=[stop, "never seen"])
        assert (answer.text, answer.finish_reason) == (expected, "stop")
        assert (
            "".join(served.pieces(scheme, False, **params, stop=[stop, "never seen"])) == expected
        )


# ---- when ----------------------------------------------------------------------------------


def test_the_first_piece_comes_while_the_server_still_decodes(
    byte_level: Served, scheme: str
) -> None:
    def num_generated() -> float:
        return metric(byte_level.server, "tandem_output_tokens_total")

    before = num_generated()
    params = {"input_ids": byte_level.prompt(2, length=64), "max_tokens": 440, "ignore_eos": True}
    with TandemClient(byte_level.url(scheme)) as client, client.stream(**params) as stream:
        next(stream)
        generated_at_first_piece = num_generated() - before
        assert stream.result().num_output_tokens == 440
    wait_until(lambda: num_generated() - before == 440)
    assert generated_at_first_piece < 330


def test_another_request_is_answered_in_the_middle_of_a_stream(byte_level: Served) -> None:
    async def run() -> tuple[int, int]:
        params = {"input_ids": byte_level.prompt(3), "max_tokens": 300, "ignore_eos": True}
        async with byte_level.client("grpc") as client, client.stream(**params) as stream:
            await anext(stream)
            other = asyncio.create_task(client.generate("hello", max_tokens=1))
            num_before = 0
            async for _ in stream:
                num_before += not other.done()
            await other
            return num_before, 300

    num_before, num_tokens = asyncio.run(run())
    assert num_before < num_tokens / 2


# ---- the end -------------------------------------------------------------------------------

ENDS: dict[str, dict[str, Any]] = {
    "length": {"max_tokens": 9, "ignore_eos": True},
    "one token": {"max_tokens": 1},
    "long prompt": {"max_tokens": 9, "input_ids": random_prompt(300, 280, 9)},
    "long prompt, one token": {"max_tokens": 1, "input_ids": random_prompt(300, 280, 10)},
    "stop token": {"max_tokens": 9, "stop_token_ids": list(range(280))},
    "stop string": {"max_tokens": 64, "stop": [chr(code) for code in range(0x61, 0x71)]},
}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("protocol", ["grpc", "generate_stream"])
@pytest.mark.parametrize("end", ENDS)
def test_exactly_one_final_response(
    byte_level: Served, end: str, protocol: str, stream: bool
) -> None:
    inputs = {"input_ids": byte_level.prompt(4), "stream": stream} | ENDS[end]
    answer = ask(byte_level.server, protocol, inputs)
    assert answer.error is None
    is_final = ["finish_reason" in response for response in answer.responses]
    assert is_final.count(True) == 1
    assert is_final[-1]
    if not stream:
        assert len(is_final) == 1


def test_a_refused_stream_has_one_error_and_nothing_else(byte_level: Served) -> None:
    for protocol in ("grpc", "generate_stream"):
        inputs = {"text_input": "hello", "max_tokens": 0, "stream": True}
        answer = ask(byte_level.server, protocol, inputs)
        assert (len(answer.responses), answer.error is None) == (0, False)


def test_requests_that_share_a_grpc_stream_have_a_final_response_each(byte_level: Served) -> None:
    messages = []
    for count in range(1, 9):
        inputs = {"input_ids": byte_level.prompt(count), "max_tokens": count, "stream": True}
        message = infer_request("llm", tensors_of(inputs | {"ignore_eos": True}))
        message.id = str(count)
        messages.append(message)
    answer = stream_infer(byte_level.server, *messages)
    finals = [r["num_output_tokens"][0] for r in answer.responses if "finish_reason" in r]
    assert sorted(finals) == list(range(1, 9))


# ---- many at once --------------------------------------------------------------------------


def test_16_interleaved_streams_keep_their_own_text(byte_level: Served, scheme: str) -> None:
    """Every stream has shown its first piece before any is read on."""
    prompts = [byte_level.prompt(i, length=8 + 12 * i) for i in range(16)]
    oracle = byte_level.oracle
    expected = [oracle.generate(ids, 60, eos_token_id=None) for ids in prompts]

    async def run() -> list[tuple[str, Completion]]:
        all_began = asyncio.Barrier(len(prompts))

        async def read(ids: list[int]) -> tuple[str, Completion]:
            params = {"max_tokens": 60, "ignore_eos": True, "return_output_ids": True}
            async with client.stream(input_ids=ids, **params) as stream:
                pieces = [(await anext(stream)).text]
                await all_began.wait()
                pieces += [chunk.text async for chunk in stream]
                return "".join(pieces), await stream.result()

        async with byte_level.client(scheme) as client:
            return await asyncio.gather(*(read(ids) for ids in prompts))

    for (text, completion), ids in zip(asyncio.run(run()), expected, strict=True):
        assert completion.output_ids == tuple(ids)
        assert text == completion.text == oracle.text(ids)
