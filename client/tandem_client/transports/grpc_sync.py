"""ModelStreamInfer over a blocking gRPC channel."""

from __future__ import annotations

from collections.abc import Generator

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tandem_client.request import GenerateRequest
from tandem_client.response import Response
from tandem_client.transports.base import Endpoint
from tandem_client.transports.grpc_messages import (
    channel_options,
    channel_target,
    error_from_rpc,
    infer_request,
    response_from_message,
)


class GrpcTransport:
    """One channel; every request is a stream of its own on it."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._channel = grpc.insecure_channel(
            channel_target(endpoint), options=channel_options(endpoint)
        )
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def send(self, request: GenerateRequest) -> Generator[Response, None, None]:
        message = infer_request(self._endpoint.model, request)
        call = self._stub.ModelStreamInfer(iter((message,)), timeout=self._endpoint.timeout_s)
        try:
            for answer in call:
                yield response_from_message(answer)
        except grpc.RpcError as error:
            raise error_from_rpc(self._endpoint, error) from error
        finally:
            call.cancel()  # does nothing to a call that has ended

    def is_ready(self) -> bool:
        timeout_s = self._endpoint.connect_timeout_s
        try:
            server = self._stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=timeout_s)
            if not server.ready:
                return False
            question = service_pb2.ModelReadyRequest(name=self._endpoint.model)
            return bool(self._stub.ModelReady(question, timeout=timeout_s).ready)
        except grpc.RpcError:
            return False

    def close(self) -> None:
        self._channel.close()
