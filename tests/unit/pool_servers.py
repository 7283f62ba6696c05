"""Pools as a link sees them: Triton's gRPC in this process, and a stand-in for its BLS."""

from __future__ import annotations

import asyncio
import sys
import types
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

from tandem.error_text import error_text
from tandem.errors import ErrorCode, TandemError

Outputs = tuple[bytes, bytes]  # result, handle
Model = Callable[[str, bytes, bytes], Awaitable[Outputs]]  # name, request, handle
_STATUS = {
    ErrorCode.INVALID_ARG: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    ErrorCode.CANCELLED: grpc.StatusCode.CANCELLED,
    ErrorCode.INTERNAL: grpc.StatusCode.INTERNAL,
}


class TritonError(Exception):
    """Triton's own words instead of a model's answer."""

    def __init__(self, status: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.status = status


class Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self, model: Model) -> None:
        self.model = model
        self.is_ready = True
        self.num_probes = 0
        self.is_deaf = False

    async def ModelReady(self, request: Any, context: Any) -> Any:
        self.num_probes += 1
        if self.is_deaf:
            await asyncio.Event().wait()
        return service_pb2.ModelReadyResponse(ready=self.is_ready)

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        raw = dict(zip((i.name for i in request.inputs), request.raw_input_contents, strict=True))
        values = {name: deserialize_bytes_tensor(value)[0] for name, value in raw.items()}
        try:
            outputs = await self.model(request.model_name, values["request"], values["handle"])
        except TandemError as error:
            await context.abort(_STATUS[error.code], error_text(error))
        except TritonError as error:
            await context.abort(error.status, str(error))
        response = service_pb2.ModelInferResponse(model_name=request.model_name)
        for name, value in zip(("result", "handle"), outputs, strict=True):
            response.outputs.add(name=name, datatype="BYTES", shape=[1, 1])
            tensor = serialize_byte_tensor(np.array([[value]], dtype=np.object_))
            response.raw_output_contents.append(tensor.item())
        return response


@asynccontextmanager
async def grpc_server(servicer: Servicer, port: int = 0) -> AsyncIterator[int]:
    """The port it serves on. At the end its calls end at once."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


def fake_bls(monkeypatch: pytest.MonkeyPatch, model: Model) -> None:
    """Puts what the BLS link uses of Triton's module in its place."""

    class TritonModelException(Exception):
        pass

    class Tensor:
        def __init__(self, name: str, array: Any) -> None:
            self.name, self.array = name, array

        def as_numpy(self) -> Any:
            return self.array

    class Response:
        def __init__(self, outputs: dict[str, bytes], error: str = "") -> None:
            self.outputs, self.text = outputs, error

        def has_error(self) -> bool:
            return bool(self.text)

        def error(self) -> Any:
            return types.SimpleNamespace(message=lambda: self.text)

    class InferenceRequest:
        def __init__(
            self, model_name: str, requested_output_names: list[str], inputs: list[Any]
        ) -> None:
            self.name, self.names = model_name, requested_output_names
            self.values = {tensor.name: tensor.array.reshape(-1)[0] for tensor in inputs}

        async def async_exec(self) -> Response:
            values = self.values
            try:
                outputs = await model(self.name, values["request"], values["handle"])
            except TandemError as error:
                return Response({}, f"Failed to process the request: {error_text(error)}")
            except TritonError as error:
                raise TritonModelException(str(error)) from error
            return Response(dict(zip(self.names, outputs, strict=True)))

    def output(response: Response, name: str) -> Tensor:
        return Tensor(name, np.array([[response.outputs[name]]], dtype=np.object_))

    module = types.SimpleNamespace(
        InferenceRequest=InferenceRequest,
        Tensor=Tensor,
        TritonModelException=TritonModelException,
        get_output_tensor_by_name=output,
    )
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", module)  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, "tandem.triton_backend.bls_link", raising=False)
