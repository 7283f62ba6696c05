"""Fake Triton servers that play a script, and tests that requests reach them in Triton's format.

They speak the real protocols over 127.0.0.1; the other client tests run against them.
"""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tandem_client import GenerateParams, GenerateRequest, InvalidRequest, TandemClient
from tandem_client.request import build_request
from tandem_client.transports.grpc_messages import INPUT_TYPES

TIMINGS = {
    "path": "remote",
    "prefill_worker": "prefill_0_0",
    "decode_worker": "decode_0_0",
    "ttft_ms": 212.4,
    "decode_ms": 437.0,
    "transfer_ms": 0.8,
    "kv_bytes": 1_200_000,
    "transport": "shm",
}
PATIENCE_S = 5.0  # only a failing test waits this long


@dataclass(frozen=True)
class Error:
    """An error of the model. ``status`` is that of HTTP if it comes before any response.

    Triton 24.10 answers 400 whatever the code of the model's error is.
    """

    message: str
    status: int = 400


@dataclass(frozen=True)
class Abort:
    """A call that ends with a gRPC status."""

    status: grpc.StatusCode
    message: str


class Hang:
    """Say nothing more until the client goes away."""


class Drip:
    """Send a token every 10 ms until the client goes away."""


class Cut:
    """Break the connection (HTTP only)."""


Step = dict[str, Any] | Error | Abort | Hang | Drip | Cut


def token(text: str, **outputs: Any) -> dict[str, Any]:
    return {"text_output": text, **outputs}


def final(text: str, num_output_tokens: int, **outputs: Any) -> dict[str, Any]:
    return {
        "text_output": text,
        "finish_reason": "stop",
        "num_input_tokens": 3,
        "num_output_tokens": num_output_tokens,
        "timings": json.dumps(TIMINGS),
        **outputs,
    }


@dataclass
class FakeTriton:
    """What a server plays and what it saw. ``script`` is replayed for every request."""

    script: list[Step] = field(default_factory=list)
    ready_models: set[str] = field(default_factory=lambda: {"llm"})
    url: str = ""
    paths: list[str] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    client_left: threading.Event = field(default_factory=threading.Event)


@contextmanager
def http_server(fake: FakeTriton) -> Iterator[FakeTriton]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None: ...

        def do_GET(self) -> None:
            is_known = self.path == "/v2/health/ready" or any(
                self.path == f"/v2/models/{model}/ready" for model in fake.ready_models
            )
            self._reply(200 if is_known else 400, b"")

        def do_POST(self) -> None:
            fake.paths.append(self.path)
            body = self.rfile.read(int(self.headers["content-length"]))
            fake.requests.append(json.loads(body))
            if self.path.endswith("/generate_stream"):
                self._stream()
            else:
                self._whole(fake.script[0])

        def _whole(self, step: Step) -> None:
            if isinstance(step, Hang):
                self._wait_for_close()
            elif isinstance(step, Error):
                self._reply(step.status, json.dumps({"error": step.message}).encode())
            else:
                self._reply(200, _json(step))

        def _stream(self) -> None:
            first = fake.script[0] if fake.script else None
            self.send_response(first.status if isinstance(first, Error) else 200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for step in fake.script:
                if isinstance(step, Hang):
                    return self._wait_for_close()
                if isinstance(step, Drip):
                    return self._drip()
                if isinstance(step, Cut):
                    self.close_connection = True
                    return
                if isinstance(step, Error):
                    step = {"error": step.message}
                event = b"data: " + _json(step) + b"\n\n"
                half = len(event) // 2  # an event, and a character, may span two reads
                self._write_chunk(event[:half])
                self._write_chunk(event[half:])
            self.wfile.write(b"0\r\n\r\n")

        def _write_chunk(self, data: bytes) -> None:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.flush()

        def _drip(self) -> None:
            self.close_connection = True
            try:
                while not fake.client_left.wait(0.01):
                    self._write_chunk(b"data: " + _json(token("a")) + b"\n\n")
            except OSError:
                fake.client_left.set()

        def _wait_for_close(self) -> None:
            self.connection.settimeout(PATIENCE_S)
            self.close_connection = True
            try:
                if self.connection.recv(1) == b"":
                    fake.client_left.set()
            except ConnectionResetError:
                fake.client_left.set()
            except TimeoutError:
                pass

        def _reply(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def grpc_server(fake: FakeTriton) -> Iterator[FakeTriton]:
    class Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):
        def ServerReady(self, request: Any, context: Any) -> Any:
            return service_pb2.ServerReadyResponse(ready=True)

        def ModelReady(self, request: Any, context: Any) -> Any:
            return service_pb2.ModelReadyResponse(ready=request.name in fake.ready_models)

        def ModelStreamInfer(self, requests: Any, context: Any) -> Iterator[Any]:
            is_over = threading.Event()
            ended = threading.Event()

            def on_end() -> None:
                ended.set()
                if not is_over.is_set():
                    fake.client_left.set()

            # From the start: gRPC does not resume this generator once the client has left.
            context.add_callback(on_end)
            for request in requests:
                fake.paths.append(request.model_name)
                fake.requests.append({tensor.name: _value(tensor) for tensor in request.inputs})
                for step in fake.script:
                    if isinstance(step, Hang):
                        ended.wait(PATIENCE_S)
                        break
                    if isinstance(step, Drip):
                        while not ended.wait(0.01):
                            yield _message(token("a"))
                        return
                    if isinstance(step, Abort):
                        is_over.set()
                        context.abort(step.status, step.message)
                    yield _message(step)
            is_over.set()

    # so_reuseport would let a second server of a parallel run share the port.
    server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Servicer(), server)
    fake.url = f"grpc://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield fake
    finally:
        server.stop(None).wait()


SERVERS = {"http": http_server, "grpc": grpc_server}


def _json(outputs: Any) -> bytes:
    """Like Triton: unescaped UTF-8, and a tensor of one element as a scalar."""
    flat = {
        name: value[0] if isinstance(value, list) and len(value) == 1 else value
        for name, value in outputs.items()
    }
    return json.dumps(flat, ensure_ascii=False).encode()


def _message(step: Any) -> Any:
    if isinstance(step, Error):
        return service_pb2.ModelStreamInferResponse(error_message=step.message)
    message = service_pb2.ModelStreamInferResponse()
    for name, value in step.items():
        elements = value if isinstance(value, list) else [value]
        datatype, raw = _raw(elements)
        message.infer_response.outputs.add(name=name, datatype=datatype, shape=[len(elements)])
        message.infer_response.raw_output_contents.append(raw)
    return message


def _raw(elements: list[Any]) -> tuple[str, bytes]:
    if isinstance(elements[0], str):
        texts = [text.encode() for text in elements]
        return "BYTES", b"".join(struct.pack("<I", len(text)) + text for text in texts)
    if isinstance(elements[0], float):
        return "FP32", struct.pack(f"<{len(elements)}f", *elements)
    return "INT32", struct.pack(f"<{len(elements)}i", *elements)


def _value(tensor: Any) -> tuple[str, list[int], list[Any]]:
    contents = next(value for _, value in tensor.contents.ListFields())
    return tensor.datatype, list(tensor.shape), list(contents)


def test_http_body_has_plain_keys_arrays_and_messages_as_text() -> None:
    messages = [{"role": "user", "content": "Grüße"}]
    with http_server(FakeTriton([final("ok", 1)])) as fake, TandemClient(fake.url) as client:
        client.generate(messages=messages, stop="\n", temperature=0, seed=2**40, input_ids=[7])
        for _ in client.stream("Hi", ignore_eos=False, sampling_parameters={"top_k": 4}):
            pass
    assert fake.paths == ["/v2/models/llm/generate", "/v2/models/llm/generate_stream"]
    first, second = fake.requests
    assert json.loads(first.pop("messages")) == messages
    assert first == {
        "stream": False,
        "stop": ["\n"],
        "temperature": 0.0,
        "seed": 2**40,
        "input_ids": [7],
    }
    assert json.loads(second.pop("sampling_parameters")) == {"top_k": 4}
    assert second == {"stream": True, "text_input": "Hi", "ignore_eos": False}


def test_grpc_tensors_have_triton_types_and_shapes() -> None:
    with grpc_server(FakeTriton([final("ok", 1)])) as fake:
        with TandemClient(fake.url, model="ensemble") as client:
            client.generate(
                "é",
                input_ids=np.array([1, 2, 3], dtype=np.int32),
                temperature=0,
                seed=-(2**63),
                stop=["a", "b"],
                stop_token_ids=[],
                ignore_eos=True,
                max_tokens=5,
            )
    assert fake.paths == ["ensemble"]
    assert fake.requests == [
        {
            "stream": ("BOOL", [1], [False]),
            "text_input": ("BYTES", [1], ["é".encode()]),
            "input_ids": ("INT32", [3], [1, 2, 3]),
            "temperature": ("FP32", [1], [0.0]),
            "seed": ("INT64", [1], [-(2**63)]),
            "stop": ("BYTES", [2], [b"a", b"b"]),
            "ignore_eos": ("BOOL", [1], [True]),
            "max_tokens": ("INT32", [1], [5]),
        }
    ]


def test_every_field_of_the_request_has_a_keyword_and_a_tensor_type() -> None:
    fields = set(GenerateRequest.__struct_fields__)
    assert set(INPUT_TYPES) == fields
    assert set(GenerateParams.__annotations__) == fields - {"stream", "text_input"}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": "9"}, "max_tokens: Expected `int"),
        ({"max_tokens": True}, "max_tokens: Expected `int"),
        ({"input_ids": [1, 2**31]}, r"input_ids\[1\]: Expected `int` <= 2147483647"),
        ({"top_q": 1}, "unknown field `top_q`"),
    ],
)
def test_a_wrong_type_is_refused_and_named(params: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        build_request("Hi", True, params)


def test_limits_are_left_to_the_server() -> None:
    request = build_request(None, False, {"temperature": -1, "max_tokens": None})
    assert request == GenerateRequest(stream=False, temperature=-1.0)
