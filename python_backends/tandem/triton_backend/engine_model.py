"""The prefill and decode models: a thin shim between Triton and an engine process."""

from __future__ import annotations

import json
import os
import re
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from tandem import wire
from tandem.config import (
    EngineConfig,
    EngineSettings,
    deployment_from_env,
    parse_parameters,
    release_runtime_dir,
)
from tandem.errors import ConfigError, InvalidRequest, TandemError, from_wire
from tandem.metrics import ENGINE_FAMILIES, MetricsBuffer
from tandem.triton_backend.engine_supervisor import EngineSupervisor
from tandem.triton_backend.logging_setup import set_up_logging
from tandem.triton_backend.responses import error_response, send_final
from tandem.triton_backend.triton_metrics import TritonMetrics


class TritonPythonModel:
    """One instance, one engine. Answers come from the supervisor's thread, in any order."""

    def initialize(self, args: dict[str, str]) -> None:
        instance = args["model_instance_name"]
        deployment = deployment_from_env()
        worker = deployment.worker_name(instance)
        set_up_logging(deployment.log_level, worker)
        model_config = json.loads(args["model_config"])
        settings = parse_parameters(EngineSettings, model_config["parameters"])
        self._deployment = deployment
        metrics = MetricsBuffer()
        labels = {"worker": worker, "role": settings.role.value}
        self._metrics = TritonMetrics(metrics, ENGINE_FAMILIES, labels)
        config = EngineConfig(
            deployment=deployment,
            settings=settings,
            worker=worker,
            device=_device(settings, args),
            cores=_cores(settings, instance),
            channel=f"ipc://{deployment.runtime_dir}/engine-{instance}",
        )
        self._supervisor = EngineSupervisor(
            config, metrics, has_siblings=_num_instances(model_config) > 1
        )
        self._supervisor.start()

    def execute(self, requests: list[Any]) -> list[None]:
        for request in requests:
            sender = request.get_response_sender()
            try:
                spec = _one_bytes(request, "request")
                handle = _one_bytes(request, "handle")
            except TandemError as error:
                send_final(sender, error_response(error))
                continue
            self._supervisor.submit(spec, handle, _answerer(sender))
        self._supervisor.wait_for_room()
        return [None] * len(requests)

    def finalize(self) -> None:
        self._supervisor.stop()
        self._metrics.stop()
        release_runtime_dir(self._deployment)


def _answerer(sender: Any) -> Any:
    def answer(reply: wire.Reply) -> None:
        if reply.error:
            send_final(sender, error_response(from_wire(reply.error, reply.message)))
            return
        outputs = [
            pb_utils.Tensor("result", np.array([[reply.result]], dtype=np.object_)),
            pb_utils.Tensor("handle", np.array([[reply.handle]], dtype=np.object_)),
        ]
        send_final(sender, pb_utils.InferenceResponse(outputs))

    return answer


def _one_bytes(request: Any, name: str) -> bytes:
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    values = [] if tensor is None else list(tensor.as_numpy().reshape(-1))
    if name == "handle" and not values:
        return b""
    if len(values) != 1:
        raise InvalidRequest(name, f"one element per request, got {len(values)}")
    return bytes(values[0])


def _device(settings: EngineSettings, args: dict[str, str]) -> str:
    if settings.device == "cpu":
        return "cpu"
    if settings.device != "cuda":
        raise ConfigError(f"device = {settings.device!r}: cpu or cuda")
    if args["model_instance_kind"] != "GPU":
        raise ConfigError("device = cuda: the instance_group must be KIND_GPU")
    return f"cuda:{args['model_instance_device_id']}"


def _num_instances(model_config: dict[str, Any]) -> int:
    groups = model_config["instance_group"]
    return sum(group["count"] * max(1, len(group.get("gpus", []))) for group in groups)


def _cores(settings: EngineSettings, instance: str) -> tuple[int, ...]:
    """The cores of instance i of the model: disjoint as long as the machine has enough."""
    if settings.first_core < 0:
        return ()
    available = sorted(os.sched_getaffinity(0))
    match = re.search(r"_(\d+)$", instance)
    index = int(match.group(1)) if match else 0
    first = settings.first_core + index * settings.cores_per_instance
    wanted = range(first, first + settings.cores_per_instance)
    return tuple(available[core % len(available)] for core in wanted)
