"""The llm model: carries requests from Triton to the orchestrator, and responses back."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from tandem.config import (
    Deployment,
    OrchestratorSettings,
    deployment_from_env,
    parse_parameters,
    release_runtime_dir,
)
from tandem.drain import forget_drain, requested_grace_s, say_drained
from tandem.engine.model_config import model_limits
from tandem.errors import InvalidRequest, TandemError
from tandem.metrics import ORCHESTRATOR_FAMILIES, MetricsBuffer
from tandem.orchestrator.call_places import CallPlaces
from tandem.orchestrator.link import TritonLink
from tandem.orchestrator.orchestrator import Orchestrator
from tandem.orchestrator.responder import Response, Usage
from tandem.orchestrator.sampling_defaults import load_sampling_defaults
from tandem.orchestrator.stream_listener import listener_for
from tandem.orchestrator.stream_plane import StreamPlane
from tandem.orchestrator.tokenizer import Tokenizer
from tandem.triton_backend.bls_link import BLSLink
from tandem.triton_backend.logging_setup import set_up_logging
from tandem.triton_backend.responses import error_response, send_final
from tandem.triton_backend.triton_metrics import TritonMetrics
from tandem.types import Role

_POLL_S = 0.1
_MAX_CHECKS_PER_POLL = 40  # a check costs 250 µs of the event loop
_log = logging.getLogger(__name__)


class TritonPythonModel:
    """Triton's thread only reads the inputs; everything else happens on the event loop's thread."""

    def initialize(self, args: dict[str, str]) -> None:
        self._deployment = deployment_from_env()
        self._runtime_dir = Path(self._deployment.runtime_dir)
        name = args["model_instance_name"]
        set_up_logging(self._deployment.log_level, name)
        model_config = json.loads(args["model_config"])
        settings = parse_parameters(OrchestratorSettings, model_config["parameters"])
        self._input_names = [tensor["name"] for tensor in model_config["input"]]
        metrics = MetricsBuffer()
        self._metrics = TritonMetrics(metrics, ORCHESTRATOR_FAMILIES, {"orchestrator": name})
        self._plane = StreamPlane(
            name, listener_for(self._deployment, name), settings.worker_timeout_s
        )
        self._link = _link_for(self._deployment, settings)
        self._orchestrator = Orchestrator(
            settings=settings,
            vocab_size=model_limits(self._deployment.model).vocab_size,
            tokenizer=Tokenizer(self._deployment.model),
            defaults=load_sampling_defaults(self._deployment.model),
            link=self._link,
            plane=self._plane,
            metrics=metrics,
        )
        self._live: dict[asyncio.Task[None], _TritonResponder] = {}
        self._loop = asyncio.new_event_loop()
        # asyncio's own default is 6 threads on 2 cores, a hidden limit of the calls in flight.
        self._loop.set_default_executor(ThreadPoolExecutor(2 * settings.max_calls_in_flight))
        self._thread = threading.Thread(target=self._run, name="orchestrator", daemon=True)
        self._stopping = asyncio.Event()
        self._started = threading.Event()
        self._thread.start()
        if not self._started.wait(10):
            raise RuntimeError("the stream plane did not start; see the log above")

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            responder = _TritonResponder(request.get_response_sender())
            try:
                inputs = self._inputs(request)
                parameters = json.loads(request.parameters() or "{}")
                if request.timeout():  # Triton takes it out of the parameters
                    parameters["timeout"] = request.timeout()
            except TandemError as error:
                responder.fail(error)
                continue
            self._loop.call_soon_threadsafe(self._serve, inputs, parameters, responder)

    def finalize(self) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(timeout=20)
        self._metrics.stop()
        release_runtime_dir(self._deployment)

    def _inputs(self, request: Any) -> dict[str, Any]:
        inputs = {}
        for name in self._input_names:
            tensor = pb_utils.get_input_tensor_by_name(request, name)
            if tensor is not None:
                try:
                    inputs[name] = tensor.as_numpy()
                except Exception as error:  # bytes that are no Triton string tensor
                    raise InvalidRequest(name, f"cannot be read: {error}") from error
        return inputs

    # ---- the event loop's thread -------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._main())

    async def _main(self) -> None:
        self._plane.start()
        polling = asyncio.create_task(self._poll_cancellations())
        self._started.set()
        await self._link.start()
        draining = asyncio.create_task(self._watch_for_drain())
        await self._stopping.wait()
        self._orchestrator.drain()
        polling.cancel()
        draining.cancel()
        await self._end_all()
        await asyncio.gather(polling, draining, return_exceptions=True)
        self._orchestrator.close()
        await self._link.stop()
        await self._plane.stop()
        forget_drain(self._runtime_dir, self._plane.name)

    async def _end_all(self) -> None:
        for task in list(self._live):
            task.cancel()
        await asyncio.gather(*self._live, return_exceptions=True)

    async def _watch_for_drain(self) -> None:
        """On demand: no new requests; those that run end, by themselves or after the grace."""
        while (grace_s := requested_grace_s(self._runtime_dir)) is None:
            await asyncio.sleep(_POLL_S)
        _log.warning("draining: %d requests have %g s to end", len(self._live), grace_s)
        self._orchestrator.drain()
        if self._live:
            await asyncio.wait(list(self._live), timeout=grace_s)
        await self._end_all()
        say_drained(self._runtime_dir, self._plane.name)

    def _serve(
        self,
        inputs: Mapping[str, Any],
        parameters: Mapping[str, Any],
        responder: _TritonResponder,
    ) -> None:
        task = self._loop.create_task(self._orchestrator.serve(inputs, parameters, responder))
        self._live[task] = responder
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        responder = self._live.pop(task)
        if task.cancelled():  # before its first step; later ``serve`` answers by itself
            responder.fail(self._orchestrator.cancelled())

    async def _poll_cancellations(self) -> None:
        """Triton tells nobody that a client went away; it has to be asked, in turn, not at once."""
        while True:
            await asyncio.sleep(_POLL_S)
            oldest_first = sorted(self._live.items(), key=lambda item: item[1].checked_s)
            for task, responder in oldest_first[:_MAX_CHECKS_PER_POLL]:
                if responder.is_cancelled():
                    task.cancel()


def _link_for(deployment: Deployment, settings: OrchestratorSettings) -> TritonLink:
    servers = {Role.PREFILL: deployment.prefill_servers, Role.DECODE: deployment.decode_servers}
    if not deployment.decode_servers:
        return BLSLink(CallPlaces(settings.max_calls_in_flight))
    from tandem.orchestrator.grpc_link import GRPCLink  # slow to import
    from tandem.orchestrator.remote_pool import RemotePool

    return GRPCLink({role: RemotePool(role, found) for role, found in servers.items() if found})


class _TritonResponder:
    """Lets go of its sender with the final response. Triton frees what is behind it then: asking it
    after that whether the request is cancelled ends the whole server. And as long as the sender
    lives, perhaps in the traceback of an error, the model cannot be unloaded.
    """

    def __init__(self, sender: Any) -> None:
        self._sender: Any | None = sender
        self.checked_s = time.monotonic()

    def send(self, response: Response) -> None:
        assert self._sender is not None
        self._sender.send(pb_utils.InferenceResponse(_text_tensors(response)))

    def send_final(self, response: Response, usage: Usage) -> None:
        tensors = _text_tensors(response)
        if usage.finish_reason is not None:
            tensors.append(_bytes_tensor("finish_reason", usage.finish_reason))
        for name in ("num_input_tokens", "num_output_tokens"):
            count = getattr(usage, name)
            if count is not None:
                tensors.append(pb_utils.Tensor(name, np.array([count], np.int32)))
        if usage.timings is not None:
            tensors.append(_bytes_tensor("timings", json.dumps(usage.timings)))
        self._send_last(pb_utils.InferenceResponse(tensors))

    def fail(self, error: TandemError) -> None:
        self._send_last(error_response(error))

    def _send_last(self, response: Any) -> None:
        sender, self._sender = self._sender, None
        send_final(sender, response)

    def is_cancelled(self) -> bool:
        self.checked_s = time.monotonic()
        return self._sender is not None and bool(self._sender.is_cancelled())


def _text_tensors(response: Response) -> list[Any]:
    tensors = [_bytes_tensor("text_output", response.text)]
    if response.output_ids is not None:
        tensors.append(pb_utils.Tensor("output_ids", np.array(response.output_ids, np.int32)))
    if response.logprobs is not None:
        tensors.append(pb_utils.Tensor("logprobs", np.array(response.logprobs, np.float32)))
    return tensors


def _bytes_tensor(name: str, text: str) -> Any:
    return pb_utils.Tensor(name, np.array([text.encode()], dtype=np.object_))
