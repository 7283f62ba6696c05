"""An LLM in a Triton server, known by its addresses; inputs as Triton's vLLM backend has them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2_grpc

from triton_calls import PROTOCOLS, TIMEOUT_S, Answer, ask, infer_request, outputs_of, tensors_of

STREAMS = tuple(protocol for protocol in PROTOCOLS if protocol != "generate")
# Sent only to a model that has them.
SWITCHES = (
    "exclude_input_in_output",
    "return_finish_reason",
    "return_num_input_tokens",
    "return_num_output_tokens",
)


@dataclass(frozen=True)
class Piece:
    """One response of a gRPC stream."""

    request_id: str
    text: str
    is_final: bool


@dataclass(frozen=True)
class Endpoint:
    """``grpc_address`` is "" where only HTTP is to be had. ``needs_all``: what is unsupported is a
    failure and no skip.
    """

    http_url: str
    grpc_address: str
    model: str
    needs_all: bool = False

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.http_url}/v2/{path}", timeout=TIMEOUT_S, verify=False)

    @contextmanager
    def stub(self) -> Iterator[Any]:
        if not self.grpc_address:
            self.lacks("gRPC: no --grpc-url was given")
        with grpc.insecure_channel(self.grpc_address) as channel:
            yield service_pb2_grpc.GRPCInferenceServiceStub(channel)

    @cached_property
    def metadata(self) -> dict[str, Any]:
        return dict(self.get(f"models/{self.model}").raise_for_status().json())

    def has(self, kind: str, name: str) -> bool:
        """Whether the model has this tensor among its "inputs" or "outputs"."""
        return any(tensor["name"] == name for tensor in self.metadata[kind])

    def require_output(self, name: str) -> None:
        if not self.has("outputs", name):
            self.lacks(f"output {name}")

    def lacks(self, what: str) -> NoReturn:
        if self.needs_all:
            pytest.fail(f"unsupported: {what}")
        pytest.skip(f"unsupported: {what}")

    def inputs(self, prompt: str, stream: bool, sampling: dict[str, Any]) -> dict[str, Any]:
        switches = {name: True for name in SWITCHES if self.has("inputs", name)}
        text = json.dumps({"temperature": 0, "max_tokens": 24} | sampling)
        return {"text_input": prompt, "stream": stream, "sampling_parameters": text} | switches

    def ask(self, protocol: str, prompt: str, **sampling: Any) -> Answer:
        """Greedy and at most 24 tokens unless told otherwise; the answer may be an error."""
        return self.send(protocol, self.inputs(prompt, protocol in STREAMS, sampling))

    def send(self, protocol: str, inputs: dict[str, Any]) -> Answer:
        if protocol == "grpc" and not self.grpc_address:
            self.lacks("gRPC: no --grpc-url was given")
        return ask(self, protocol, inputs, self.model)

    def good(self, protocol: str, prompt: str, **sampling: Any) -> Answer:
        """An answer; where the error names a sampling parameter, that is unsupported."""
        answer = self.ask(protocol, prompt, **sampling)
        if answer.error is not None:
            for name in sampling:
                if name in answer.error:
                    self.lacks(f"{name}: {answer.error[:200]}")
            pytest.fail(answer.error)
        assert answer.responses
        return answer

    def pieces(self, *requests: tuple[str, dict[str, Any]]) -> Iterator[Piece]:
        """The responses of one gRPC stream to inputs with their request ids."""
        messages = []
        for request_id, inputs in requests:
            marked = {"triton_enable_empty_final_response": True}
            message = infer_request(self.model, tensors_of(inputs), marked)
            message.id = request_id
            messages.append(message)
        with self.stub() as stub:
            for message in stub.ModelStreamInfer(iter(messages), timeout=TIMEOUT_S):
                assert not message.error_message, message.error_message
                response = message.infer_response
                texts = outputs_of(response).get("text_output", [""])
                is_final = response.parameters["triton_final_response"].bool_param
                yield Piece(response.id, texts[0], is_final)
