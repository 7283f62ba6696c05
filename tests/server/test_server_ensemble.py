"""The ensemble answers as ``llm`` does, for clients who compose models."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from running_server import held_blocks, metric, wait_until
from tandem_cli.server import TandemServer
from triton_calls import PROTOCOLS, ask, infer_request, tensors_of

MESSAGES = json.dumps([{"role": "user", "content": "hello the world"}])
REQUESTS: dict[str, dict[str, Any]] = {
    "text": {"text_input": "hello the world"},
    "messages": {"messages": MESSAGES},
    "long text": {"text_input": "the world, hello an ing " * 12},
    "sampled": {"text_input": "hello", "temperature": 1.0, "top_p": 0.9, "top_k": 40, "seed": 3},
    "penalties": {
        "text_input": "hello",
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
    },
    "stop": {"text_input": "hello", "stop": ["a", "b", "c"], "stop_token_ids": [100, 101]},
    "min_tokens": {"text_input": "hello", "min_tokens": 8, "ignore_eos": True, "min_p": 0.1},
}


@pytest.mark.parametrize(
    "protocol,stream",
    [(p, False) for p in PROTOCOLS] + [("grpc", True), ("generate_stream", True)],
)
@pytest.mark.parametrize("case", REQUESTS)
def test_same_answer_as_llm(
    tiny_server: TandemServer, case: str, protocol: str, stream: bool
) -> None:
    inputs = REQUESTS[case] | {"max_tokens": 24, "stream": stream, "return_output_ids": True}
    expected = ask(tiny_server, protocol, inputs)
    answer = ask(tiny_server, protocol, inputs, model="ensemble")
    assert answer.error is expected.error is None
    assert answer.text == expected.text
    assert answer.output_ids == expected.output_ids
    for name in ("finish_reason", "num_input_tokens", "num_output_tokens"):
        assert answer.final(name) == expected.final(name)
    finals = ["finish_reason" in response for response in answer.responses]
    assert finals.count(True) == 1 and finals[-1]
    assert (len(finals) > 1) == (stream and len(answer.output_ids) > 1)


def test_logprobs_through_sampling_parameters(tiny_server: TandemServer) -> None:
    inputs = {"text_input": "hello", "sampling_parameters": '{"logprobs": 1, "max_tokens": 6}'}
    answer = ask(tiny_server, "generate", inputs, model="ensemble")
    expected = ask(tiny_server, "generate", inputs)
    assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert len(answer.logprobs) == 6


ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "llm refuses": ({"text_input": "hello", "max_tokens": 0}, "[INVALID_ARG] max_tokens: "),
    "preprocess refuses": ({"messages": "{"}, "[INVALID_ARG] messages: "),
    "empty": ({"text_input": ""}, "[INVALID_ARG] text_input: must not be empty"),
    "two prompts": ({"text_input": "a", "messages": MESSAGES}, "[INVALID_ARG] messages: exactly"),
    "no prompt": ({"max_tokens": 4}, "[INVALID_ARG] text_input: exactly one of"),
    "too long": ({"text_input": "x" * 9000}, "must be at most 511 tokens"),
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("case", ERRORS)
def test_errors_pass_through(tiny_server: TandemServer, case: str, protocol: str) -> None:
    inputs, message = ERRORS[case]
    answer = ask(tiny_server, protocol, inputs, model="ensemble")
    assert answer.responses == []
    assert answer.error is not None and message in answer.error
    assert answer.status == (None if protocol == "grpc" else 400)
    wait_until(lambda: held_blocks(tiny_server) == 0)


def test_the_ensemble_takes_no_parameters(tiny_server: TandemServer) -> None:
    """An unknown key of the body must not be dropped silently."""
    answer = ask(tiny_server, "generate", {"text_input": "hello", "beams": 2}, model="ensemble")
    assert answer.error is not None and "beams" in answer.error


def test_a_client_that_left_is_not_noticed_but_its_timeout_is_kept(
    tiny_server: TandemServer,
) -> None:
    """Triton cancels no step of an ensemble that runs."""

    def num_ended(outcome: str) -> float:
        return metric(tiny_server, "tandem_requests_total", outcome=outcome)

    num_before = {outcome: num_ended(outcome) for outcome in ("timeout", "cancelled")}
    inputs = {"text_input": "hello", "max_tokens": 480, "ignore_eos": True, "stream": True}
    message = infer_request("ensemble", tensors_of(inputs | {"timeout": 300_000}))
    with grpc.insecure_channel(tiny_server.grpc_address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer(iter([message]), timeout=60)
        next(call)
        call.cancel()
    wait_until(lambda: num_ended("timeout") == num_before["timeout"] + 1)
    assert num_ended("cancelled") == num_before["cancelled"]
    wait_until(lambda: held_blocks(tiny_server) == 0, 1.5)
