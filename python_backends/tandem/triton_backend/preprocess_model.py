"""The preprocess model: text or messages to token ids, for ensembles."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from tandem.config import (
    OrchestratorSettings,
    PreprocessSettings,
    deployment_from_env,
    parse_parameters,
    release_runtime_dir,
)
from tandem.errors import EngineFault, TandemError
from tandem.orchestrator.contract import parse_request
from tandem.orchestrator.tokenizer import Tokenizer
from tandem.triton_backend.logging_setup import set_up_logging
from tandem.triton_backend.responses import error_response


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._deployment = deployment_from_env()
        set_up_logging(self._deployment.log_level, args["model_instance_name"])
        parameters = json.loads(args["model_config"])["parameters"]
        settings = parse_parameters(PreprocessSettings, parameters)
        self._limits = OrchestratorSettings(max_prompt_bytes=settings.max_prompt_bytes)
        self._tokenizer = Tokenizer(self._deployment.model)

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._respond(request) for request in requests]

    def finalize(self) -> None:
        release_runtime_dir(self._deployment)

    def _respond(self, request: Any) -> Any:
        try:
            inputs = {}
            for name in ("text_input", "messages"):
                tensor = pb_utils.get_input_tensor_by_name(request, name)
                if tensor is not None:
                    inputs[name] = tensor.as_numpy()
            prompt = parse_request(inputs, {}, self._limits)
            if prompt.messages is not None:
                token_ids = self._tokenizer.encode_chat(prompt.messages)
            else:
                token_ids = self._tokenizer.encode(prompt.text_input or "")
        except TandemError as error:
            return error_response(error)
        except Exception as error:  # the request's boundary
            return error_response(EngineFault(f"{type(error).__name__}: {error}"))
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("input_ids", np.array(token_ids, np.int32))]
        )
