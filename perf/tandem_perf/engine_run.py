"""Tandem's engine on the cases of ``engine_cases``, in process; started by ``engine_speed``."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from transformers.utils import logging

from tandem import wire
from tandem.config import EngineSettings
from tandem.engine.build import build_engine, export_memory
from tandem.engine.model import load_model
from tandem.transport.in_process import InProcessTransport
from tandem.types import Quantization, Role, SamplingParams
from tandem_perf.engine_cases import Kind, cases
from tandem_perf.engine_timing import time_cases

# Tokens of a step, by what is timed: of a decode engine; vLLM's default where prompts count.
_MAX_BATCHED_TOKENS = {Kind.DECODE: 128, Kind.PREFILL: 2048, Kind.GENERATE: 2048}


class LocalEngine:
    """An engine that prefills and decodes; what it sends is only counted."""

    def __init__(self, model_dir: str, quantization: Quantization, max_tokens: int) -> None:
        model = load_model(model_dir, "auto", "cpu", quantization, max_tokens)
        settings = EngineSettings(
            role=Role.DECODE,
            kv_cache_mb=1024,
            max_num_batched_tokens=max_tokens,
            max_itl_ms=0,
        )
        self._num_tokens = 0
        self._num_added = self._num_left = 0
        self._engine = build_engine(
            settings,
            model,
            export_memory(settings, model, InProcessTransport()),
            worker="decode_0",
            fingerprint="",
            secret=b"",
            outbox=self,
            spawn=lambda run: run(),
            done=lambda event: None,
        )

    def add(self, prompt_ids: list[int], max_tokens: int) -> None:
        self._num_added += 1
        spec = wire.SequenceSpec(
            sequence_id=str(self._num_added),
            reply_to="here",
            prompt_ids=tuple(prompt_ids),
            sampling=SamplingParams(max_tokens=max_tokens),
        )
        self._engine.submit(wire.Submit(call_id=self._num_added, spec=wire.encode(spec)))

    def step(self) -> int:
        before = self._num_tokens
        self._engine.step()
        return self._num_tokens - before

    @property
    def num_unfinished(self) -> int:
        return self._num_added - self._num_left

    # ---- what the engine says ----------------------------------------------------------

    def to_shim(self, message: Any) -> None:
        self._num_left += isinstance(message, wire.Left)

    def to_orchestrator(self, name: str, message: wire.StepMessage) -> None:
        self._num_tokens += len(message.tokens)

    def meet(self, name: str) -> None:
        """There is nobody to meet."""


def main() -> None:
    arguments = json.loads(sys.argv[1])
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments["threads"]])
    torch.set_num_threads(arguments["threads"])
    logging.disable_progress_bar()
    figures: dict[str, float] = {}
    for max_tokens in sorted(set(_MAX_BATCHED_TOKENS.values())):
        engine = LocalEngine(
            arguments["model"], Quantization(arguments["quantization"]), max_tokens
        )
        now = [case for case in cases() if _MAX_BATCHED_TOKENS[case.kind] == max_tokens]
        figures |= time_cases(engine, now, arguments["repeats"])
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
