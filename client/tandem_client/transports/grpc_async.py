"""ModelStreamInfer over an asyncio gRPC channel."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

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


class AsyncGrpcTransport:
    """One channel; every request is a stream of its own on it. Belongs to one event loop."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._channel: Any = None

    async def send(self, request: GenerateRequest) -> AsyncGenerator[Response, None]:
        message = infer_request(self._endpoint.model, request)
        call = self._stub().ModelStreamInfer(iter((message,)), timeout=self._endpoint.timeout_s)
        try:
            async for answer in call:
                yield response_from_message(answer)
        except grpc.RpcError as error:
            raise error_from_rpc(self._endpoint, error) from error
        finally:
            call.cancel()  # does nothing to a call that has ended

    async def is_ready(self) -> bool:
        timeout_s = self._endpoint.connect_timeout_s
        try:
            server = await self._stub().ServerReady(
                service_pb2.ServerReadyRequest(), timeout=timeout_s
            )
            if not server.ready:
                return False
            question = service_pb2.ModelReadyRequest(name=self._endpoint.model)
            return bool((await self._stub().ModelReady(question, timeout=timeout_s)).ready)
        except grpc.RpcError:
            return False

    async def aclose(self) -> None:
        if self._channel is not None:
            await self._channel.close()

    def _stub(self) -> Any:
        # A channel takes the event loop that runs when it is made: so not in __init__.
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(
                channel_target(self._endpoint), options=channel_options(self._endpoint)
            )
        return service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
