"""Requests in Triton's own protocols, without the client: every response as it came."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
import httpx
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tandem_client.transports.grpc_messages import INPUT_TYPES

PROTOCOLS = ("grpc", "generate", "generate_stream")
TIMEOUT_S = 60.0
_CONTENTS = {
    "BYTES": "bytes_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "BOOL": "bool_contents",
}
_FORMATS = {"INT32": "i", "INT64": "q", "FP32": "f"}


class Addresses(Protocol):
    """All that is needed of a server."""

    @property
    def http_url(self) -> str: ...

    @property
    def grpc_address(self) -> str: ...


@dataclass
class Answer:
    """``responses`` hold outputs by name, each a list. ``error`` is the text of the failure."""

    responses: list[dict[str, list[Any]]] = field(default_factory=list)
    error: str | None = None
    status: int | None = None  # of HTTP

    @property
    def text(self) -> str:
        return "".join(response["text_output"][0] for response in self.responses)

    @property
    def output_ids(self) -> list[int]:
        return [i for response in self.responses for i in response["output_ids"]]

    @property
    def logprobs(self) -> list[float]:
        return [p for response in self.responses for p in response["logprobs"]]

    def final(self, name: str) -> Any:
        return self.responses[-1][name][0]


def ask(server: Addresses, protocol: str, inputs: Mapping[str, Any], model: str = "llm") -> Answer:
    """One request to a decoupled model by any of ``PROTOCOLS``; lists are tensors of one axis."""
    if protocol == "grpc":
        return stream_infer(server, infer_request(model, tensors_of(inputs)))
    return post(server, f"{model}/{protocol}", inputs)


def post(server: Addresses, path: str, body: Mapping[str, Any] | bytes) -> Answer:
    """The generate extension over HTTP; ``body`` as JSON, or as the bytes that are sent."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    reply = httpx.post(
        f"{server.http_url}/v2/models/{path}",
        content=content,
        timeout=TIMEOUT_S,
        verify=False,  # reading the trusted certificates takes longer than a short request
    )
    events = reply.content.split(b"\n") if path.endswith("generate_stream") else [reply.content]
    answer = Answer(status=reply.status_code)
    for event in events:
        if data := event.removeprefix(b"data:").strip():
            outputs = json.loads(data)
            if "error" in outputs:
                answer.error = outputs["error"]
            else:
                answer.responses.append({name: as_list(v) for name, v in outputs.items()})
    return answer


def stream_infer(server: Addresses, *messages: Any) -> Answer:
    """One gRPC stream with these requests; the answer holds all of its responses."""
    answer = Answer()
    with grpc.insecure_channel(server.grpc_address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for message in stub.ModelStreamInfer(iter(messages), timeout=TIMEOUT_S):
            if message.error_message:
                answer.error = message.error_message
            else:
                answer.responses.append(outputs_of(message.infer_response))
    return answer


def infer_request(
    model: str,
    tensors: Iterable[tuple[str, str, list[int], list[Any]]],
    parameters: Mapping[str, bool | int | str | float] | None = None,
) -> Any:
    """A ModelInferRequest of tensors, each its name, data type, shape and elements."""
    message = service_pb2.ModelInferRequest(model_name=model)
    for name, datatype, shape, elements in tensors:
        tensor = message.inputs.add(name=name, datatype=datatype, shape=shape)
        getattr(tensor.contents, _CONTENTS[datatype]).extend(elements)
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
    for name, value in (parameters or {}).items():
        setattr(message.parameters[name], kinds[type(value)], value)
    return message


def tensors_of(inputs: Mapping[str, Any]) -> list[tuple[str, str, list[int], list[Any]]]:
    """The tensors of plain values by the data types of ``llm``; all ``return_`` are BOOL."""
    tensors = []
    for name, value in inputs.items():
        datatype = INPUT_TYPES.get(name, "BOOL")
        elements = value if isinstance(value, list) else [value]
        if datatype == "BYTES":
            elements = [e.encode() if isinstance(e, str) else e for e in elements]
        tensors.append((name, datatype, [len(elements)], elements))
    return tensors


def outputs_of(response: Any) -> dict[str, list[Any]]:
    """Output name → elements of a ModelInferResponse."""
    return {
        tensor.name: _elements(tensor.datatype, raw)
        for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    }


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _elements(datatype: str, raw: bytes) -> list[Any]:
    if datatype != "BYTES":
        return [value for (value,) in struct.iter_unpack(f"<{_FORMATS[datatype]}", raw)]
    texts = []
    while raw:
        (size,) = struct.unpack_from("<I", raw)
        texts.append(raw[4 : 4 + size].decode())
        raw = raw[4 + size :]
    return texts
