"""Bad requests to the real server: refused by name of field and limit, and nothing is held."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2_grpc

from oracle import random_prompt
from running_server import held_blocks, metric, wait_until
from tandem import wire
from tandem.kv.handle import KVHandle, sign
from tandem.types import SamplingParams
from tandem_cli.server import TandemServer
from tandem_client import AsyncTandemClient, InvalidRequest
from triton_calls import PROTOCOLS, Answer, ask, infer_request, post, stream_infer, tensors_of

TEXT = "hello the world"
MAX_LEN = 512  # of tiny_server
PROMPT = random_prompt(20, 280)


@pytest.fixture(autouse=True)
def healthy(tiny_server: TandemServer) -> Iterator[None]:
    """After the test no block is held and a normal request works."""
    yield
    wait_until(lambda: held_blocks(tiny_server) == 0)
    answer = ask(tiny_server, "generate", {"text_input": TEXT, "max_tokens": 2})
    assert (answer.error, answer.status) == (None, 200)


BAD_INPUTS: dict[str, tuple[dict[str, Any], str, str]] = {  # inputs, field, limit
    "over-long prompt": ({"input_ids": [5] * MAX_LEN}, "input_ids", "at most 511 tokens"),
    "over-long text": ({"text_input": "x" * 9000}, "text_input", "at most 511 tokens"),
    "no room": (
        {"input_ids": [5] * 500, "max_tokens": 13},
        "max_tokens",
        "at most 12 after a prompt",
    ),
    "max_tokens 0": ({"max_tokens": 0}, "max_tokens", "at least 1"),
    "min above max": ({"max_tokens": 2, "min_tokens": 3}, "min_tokens", "at most max_tokens = 2"),
    "temperature -1": ({"temperature": -1.0}, "temperature", "from 0 to 100"),
    "top_p 0": ({"top_p": 0.0}, "top_p", "above 0 and at most 1"),
    "top_k -2": ({"top_k": -2}, "top_k", "at least 0, or -1"),
    "presence_penalty 3": ({"presence_penalty": 3.0}, "presence_penalty", "from -2 to 2"),
    "n 2": ({"n": 2}, "n", "only n = 1"),
    "logprobs 5": ({"logprobs": 5}, "logprobs", "0 or 1"),
    "17 stop strings": ({"stop": ["a"] * 17}, "stop", "at most 16 strings"),
    "empty stop string": ({"stop": [""]}, "stop", "from 1 to 1024 bytes"),
    "two prompts": (
        {"text_input": TEXT, "messages": "[]"},
        "messages",
        "exactly one of text_input, messages",
    ),
    "no prompt": ({"text_input": None}, "text_input", "exactly one of"),
    "empty text": ({"text_input": ""}, "text_input", "must not be empty"),
    "broken messages": ({"messages": '[{"role": "user"'}, "messages", "must be a JSON list"),
    "no messages": ({"messages": "[]"}, "messages", "at least one message"),
    "foreign id": ({"input_ids": [5, 9999]}, "input_ids", "got 9999 at position 1"),
    "negative id": ({"input_ids": [-1]}, "input_ids", "token ids must be from 0 to"),
    "foreign stop id": ({"stop_token_ids": [9999]}, "stop_token_ids", "must be from 0 to"),
    "unknown sampling parameter": (
        {"sampling_parameters": '{"beams": 4}'},
        "beams",
        "unknown; the known fields are",
    ),
    "broken sampling parameters": (
        {"sampling_parameters": "{"},
        "sampling_parameters",
        "must be a JSON object",
    ),
    "given twice": (
        {"max_tokens": 2, "sampling_parameters": '{"max_tokens": 3}'},
        "max_tokens",
        "given twice",
    ),
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_input(tiny_server: TandemServer, case: str, protocol: str) -> None:
    inputs, field, limit = BAD_INPUTS[case]
    if not {"text_input", "messages", "input_ids"} & inputs.keys():
        inputs = {"input_ids": PROMPT} | inputs

    def num_refused() -> float:
        return metric(tiny_server, "tandem_requests_total", outcome="INVALID_ARG")

    before = num_refused()
    inputs = {name: value for name, value in inputs.items() if value is not None}
    answer = ask(tiny_server, protocol, inputs)
    assert_refused(answer, protocol, field, limit)
    wait_until(lambda: num_refused() > before)


def assert_refused(answer: Answer, protocol: str, field: str, limit: str) -> None:
    assert answer.responses == []
    assert answer.error is not None
    assert f"[INVALID_ARG] {field}: " in answer.error
    assert limit in answer.error
    assert answer.status == (None if protocol == "grpc" else 400)


def test_invalid_utf8_over_grpc(tiny_server: TandemServer) -> None:
    for name in ("text_input", "messages", "sampling_parameters"):
        inputs = {"text_input": TEXT} if name == "sampling_parameters" else {}
        answer = ask(tiny_server, "grpc", inputs | {name: b"caf\xe9"})
        assert_refused(answer, "grpc", name, "must be valid UTF-8")


def test_an_empty_tensor_of_ids(tiny_server: TandemServer) -> None:
    answer = ask(tiny_server, "grpc", {"input_ids": [], "max_tokens": 2})
    assert_refused(answer, "grpc", "input_ids", "must not be empty")


def test_an_unknown_parameter(tiny_server: TandemServer) -> None:
    request = infer_request("llm", tensors_of({"text_input": TEXT}), {"max_token": 4})
    answer = stream_infer(tiny_server, request)
    assert_refused(answer, "grpc", "max_token", "unknown; the known fields are")
    for protocol in ("generate", "generate_stream"):
        answer = ask(tiny_server, protocol, {"text_input": TEXT, "max_token": 4})
        assert_refused(answer, protocol, "max_token", "unknown; the known fields are")


def test_a_tensor_of_another_type(tiny_server: TandemServer) -> None:
    """Triton itself refuses these, before the model."""
    wrong = ("max_tokens", "FP32", [1], [4.0])
    answer = stream_infer(
        tiny_server, infer_request("llm", [*tensors_of({"text_input": TEXT}), wrong])
    )
    assert answer.error is not None and "max_tokens" in answer.error and "INT32" in answer.error
    unknown = ("max_token", "INT32", [1], [4])
    answer = stream_infer(
        tiny_server, infer_request("llm", [*tensors_of({"text_input": TEXT}), unknown])
    )
    assert answer.error is not None and "max_token" in answer.error


@pytest.mark.parametrize(
    "name,value", [("max_tokens", "four"), ("temperature", "hot"), ("stream", "yes"), ("seed", {})]
)
@pytest.mark.parametrize("endpoint", ["generate", "generate_stream"])
def test_json_of_another_type(
    tiny_server: TandemServer, endpoint: str, name: str, value: object
) -> None:
    """Triton's HTTP front end refuses these; release 24.10 answers 500 and names no field."""
    answer = post(tiny_server, f"llm/{endpoint}", {"text_input": TEXT, name: value})
    assert answer.status in (400, 500)
    assert answer.responses == []
    assert answer.error is not None and "attempt to access JSON" in answer.error


def test_json_that_is_no_utf8(tiny_server: TandemServer) -> None:
    answer = post(tiny_server, "llm/generate", b'{"text_input": "caf\xe9"}')
    assert_refused(answer, "generate", "text_input", "must be valid UTF-8")


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"null"])
def test_a_body_that_is_no_json_object(tiny_server: TandemServer, body: bytes) -> None:
    """Refused by Triton's HTTP front end, as above."""
    answer = post(tiny_server, "llm/generate", body)
    assert answer.status in (400, 500)
    assert answer.error and answer.responses == []


def test_a_stream_over_generate_is_refused(tiny_server: TandemServer) -> None:
    """Triton's generate endpoint carries one response; 24.10 puts its error into a 200."""
    body = {"input_ids": PROMPT, "stream": True, "max_tokens": 8}
    answer = post(tiny_server, "llm/generate", body)
    assert answer.responses == []
    assert answer.error is not None and "exactly 1 response" in answer.error


# ---- what only llm should send to the pools ------------------------------------------------


def spec(prompt_ids: list[int], output_ids: list[int]) -> bytes:
    return wire.encode(
        wire.SequenceSpec(
            sequence_id=f"test.{time.monotonic_ns()}",
            reply_to="llm_0_0",
            prompt_ids=tuple(prompt_ids),
            output_ids=tuple(output_ids),
            sampling=SamplingParams(max_tokens=8),
        )
    )


def forged_handle(secret: bytes, version: int = 1) -> bytes:
    """Well formed, for a sequence of ``spec(PROMPT, [5])``."""
    handle = KVHandle(
        version=version,
        incarnation="0" * 16,
        transport="shm",
        endpoint="/dev/shm/nothing",
        fingerprint="none",
        block_ids=(0, 1),
        num_tokens=20,
        slot=0,
        generation=1,
        expires_unix_s=time.time() + 60,
        sequence_id="test",
        first_token=5,
    )
    return sign(handle, secret)


HANDLES = {
    "random": lambda: bytes(range(256)),
    "short": lambda: b"x",
    "forged": lambda: forged_handle(b"guessed"),
    "truncated": lambda: forged_handle(b"guessed")[:-1],
    "longer": lambda: forged_handle(b"guessed") + b"\0",
}


@pytest.mark.parametrize("kind", HANDLES)
def test_a_handle_that_is_not_ours(tiny_server: TandemServer, kind: str) -> None:
    before = metric(tiny_server, "tandem_kv_blocks", state="free", role="decode")
    request, handle = spec(PROMPT, [5]), HANDLES[kind]()
    for error in refusals(tiny_server, "decode", request, handle):
        assert "[INVALID_ARG] handle: the signature does not match" in error
    assert metric(tiny_server, "tandem_kv_blocks", state="free", role="decode") == before


def test_a_handle_of_another_engine(tiny_server: TandemServer) -> None:
    """Signed with the deployment's own secret, it still has to fit this engine."""
    secret = (tiny_server.runtime_dir.path / "secret").read_bytes()
    for handle in (forged_handle(secret), forged_handle(secret, version=2)):
        for error in refusals(tiny_server, "decode", spec(PROMPT, [5]), handle):
            assert "[INVALID_ARG] handle: " in error


@pytest.mark.parametrize("model", ["prefill", "decode"])
@pytest.mark.parametrize("garbage", [b"", b"garbage", b"\x80", b"\xc1" * 40])
def test_garbage(tiny_server: TandemServer, model: str, garbage: bytes) -> None:
    for error in refusals(tiny_server, model, garbage, b""):
        assert "[INVALID_ARG] request: not a sequence of this version" in error


def test_a_sequence_beyond_the_limits_of_the_engine(tiny_server: TandemServer) -> None:
    for ids, limit in [
        ([5] * MAX_LEN, "max_model_len 512"),
        ([9999], "ids must be in"),
        ([], "empty"),
    ]:
        for error in refusals(tiny_server, "prefill", spec(ids, []), b""):
            assert "[INVALID_ARG] prompt_ids: " in error and limit in error


def test_prefill_takes_no_handle(tiny_server: TandemServer) -> None:
    for error in refusals(tiny_server, "prefill", spec(PROMPT, [5]), forged_handle(b"guessed")):
        assert "[INVALID_ARG] handle: " in error


def refusals(server: TandemServer, model: str, request: bytes, handle: bytes) -> list[str]:
    """What /infer and gRPC ModelInfer answer; both must refuse an invalid argument."""
    tensors = [("request", "BYTES", [1, 1], [request]), ("handle", "BYTES", [1, 1], [handle])]
    with grpc.insecure_channel(server.grpc_address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as raised:
            stub.ModelInfer(infer_request(model, tensors), timeout=30)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    reply = infer_over_http(server, model, {"request": request, "handle": handle})
    assert reply.status_code == 400
    return [raised.value.details(), reply.json()["error"]]


def infer_over_http(server: TandemServer, model: str, inputs: dict[str, bytes]) -> httpx.Response:
    """KServe infer with Triton's binary tensors."""
    parts = [len(value).to_bytes(4, "little") + value for value in inputs.values()]
    described = [
        {
            "name": name,
            "datatype": "BYTES",
            "shape": [1, 1],
            "parameters": {"binary_data_size": len(part)},
        }
        for name, part in zip(inputs, parts, strict=True)
    ]
    header = json.dumps({"inputs": described}).encode()
    return httpx.post(
        f"{server.http_url}/v2/models/{model}/infer",
        content=header + b"".join(parts),
        headers={"Inference-Header-Content-Length": str(len(header))},
        timeout=30,
    )


def test_requests_that_end_while_cancellations_are_polled(tiny_server: TandemServer) -> None:
    """A response sender must not be asked after its final response: Triton would crash."""

    async def run() -> None:
        async with AsyncTandemClient(f"grpc://{tiny_server.grpc_address}") as client:

            async def refused() -> None:
                with pytest.raises(InvalidRequest):
                    await client.generate(TEXT, max_tokens=MAX_LEN)

            for _ in range(8):
                await asyncio.gather(*(refused() for _ in range(64)))

    asyncio.run(run())
