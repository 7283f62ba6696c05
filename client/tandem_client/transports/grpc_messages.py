"""Triton's ModelStreamInfer messages to and from requests and responses; no I/O.

The raw stubs are used rather than tritonclient's own client, which allows one stream per client.
"""

from __future__ import annotations

import struct
from typing import Any
from urllib.parse import urlsplit

import grpc
from tritonclient.grpc import service_pb2

from tandem_client.errors import (
    Cancelled,
    ConnectionFailed,
    DeadlineExceeded,
    InvalidRequest,
    ServerError,
    TandemClientError,
    Unavailable,
    error_from_server,
)
from tandem_client.request import GenerateRequest
from tandem_client.response import Response, response_from_outputs
from tandem_client.transports.base import Endpoint

INPUT_TYPES = {
    "text_input": "BYTES",
    "messages": "BYTES",
    "input_ids": "INT32",
    "stream": "BOOL",
    "max_tokens": "INT32",
    "min_tokens": "INT32",
    "temperature": "FP32",
    "top_p": "FP32",
    "top_k": "INT32",
    "min_p": "FP32",
    "repetition_penalty": "FP32",
    "presence_penalty": "FP32",
    "frequency_penalty": "FP32",
    "seed": "INT64",
    "stop": "BYTES",
    "stop_token_ids": "INT32",
    "ignore_eos": "BOOL",
    "logprobs": "INT32",
    "n": "INT32",
    "priority": "INT32",
    "timeout": "INT64",
    "cache_salt": "BYTES",
    "sampling_parameters": "BYTES",
    "exclude_input_in_output": "BOOL",
    "return_output_ids": "BOOL",
}
_CONTENTS_FIELD = {
    "BYTES": "bytes_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "BOOL": "bool_contents",
}
_ELEMENT_FORMAT = {"INT32": "i", "INT64": "q", "FP32": "f", "BOOL": "?"}

_ERROR_BY_STATUS: dict[Any, type[TandemClientError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    # Triton refuses inside the stream: a bare UNAVAILABLE is gRPC's word for a lost connection.
    grpc.StatusCode.UNAVAILABLE: ConnectionFailed,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Unavailable,
    grpc.StatusCode.CANCELLED: Cancelled,
}


def channel_target(endpoint: Endpoint) -> str:
    return urlsplit(endpoint.url).netloc


def channel_options(endpoint: Endpoint) -> list[tuple[str, int]]:
    return [
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        # Misnamed in gRPC: this is how long one attempt to connect may take (default 20 s).
        ("grpc.min_reconnect_backoff_ms", int(endpoint.connect_timeout_s * 1000)),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2000),
    ]


def infer_request(model: str, request: GenerateRequest) -> Any:
    """The ModelInferRequest; outputs are not listed, so that the server sends all it has."""
    message = service_pb2.ModelInferRequest(model_name=model)
    for name, value in request.inputs().items():
        elements = value if isinstance(value, tuple) else (value,)
        datatype = INPUT_TYPES[name]
        if datatype == "BYTES":
            elements = tuple(text.encode() for text in elements)
        tensor = message.inputs.add(name=name, datatype=datatype, shape=[len(elements)])
        getattr(tensor.contents, _CONTENTS_FIELD[datatype]).extend(elements)
    return message


def response_from_message(message: Any) -> Response:
    """The response in a ModelStreamInferResponse; raises the error it carries instead."""
    if message.error_message:
        raise error_from_server(message.error_message, ServerError)
    infer = message.infer_response
    try:
        return response_from_outputs(
            {
                tensor.name: _elements(tensor.datatype, raw)
                for tensor, raw in zip(infer.outputs, infer.raw_output_contents, strict=True)
            }
        )
    except (KeyError, ValueError, struct.error) as error:
        raise ServerError(f"malformed response: {error}") from error


def error_from_rpc(endpoint: Endpoint, error: Any) -> TandemClientError:
    """What a failed call means. ``error`` is a grpc.RpcError of the sync or the aio API."""
    status = error.code()
    details = error.details() or status.name
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(f"no complete answer within {endpoint.timeout_s:g} s")
    return error_from_server(details, _ERROR_BY_STATUS.get(status, ServerError))


def _elements(datatype: str, raw: bytes) -> list[Any]:
    if datatype == "BYTES":
        return _texts(raw)
    element = _ELEMENT_FORMAT[datatype]
    count = len(raw) // struct.calcsize(f"<{element}")
    return list(struct.unpack(f"<{count}{element}", raw))


def _texts(raw: bytes) -> list[str]:
    """Each element is a little-endian uint32 length and that many bytes."""
    texts = []
    position = 0
    while position < len(raw):
        (length,) = struct.unpack_from("<I", raw, position)
        start, position = position + 4, position + 4 + length
        if position > len(raw):
            raise ValueError("a BYTES tensor is cut short")
        texts.append(raw[start:position].decode())
    return texts
