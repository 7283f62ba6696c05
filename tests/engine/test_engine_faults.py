"""A request breaks the engine it runs in: it is given up, all others get their right tokens.

Orchestrator, stream plane, supervisor and engine processes are the real ones; only Triton between
orchestrator and supervisor is left out.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from faulty_engine import NUM_POISON, POISON
from tandem import wire
from tandem.config import Deployment, EngineConfig, EngineSettings, OrchestratorSettings
from tandem.errors import EngineFault, TandemError, from_wire
from tandem.metrics import Key, MetricsBuffer
from tandem.orchestrator.orchestrator import Orchestrator
from tandem.orchestrator.responder import Response, Usage
from tandem.orchestrator.sampling_defaults import SamplingDefaults
from tandem.orchestrator.stream_listener import IpcListener
from tandem.orchestrator.stream_plane import StreamPlane
from tandem.orchestrator.tokenizer import Tokenizer
from tandem.triton_backend.engine_supervisor import EngineSupervisor
from tandem.types import Policy, Role
from tiny_models import build_tiny
from tiny_tokenizers import write_byte_level

PATIENCE_S = 120.0
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 1},
    {"temperature": 0.9, "seed": 1, "top_p": 0.9, "logprobs": 1},
    {"temperature": 0.7, "seed": 2, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"temperature": 1.0, "seed": 3, "stop": ["e", "th", "o"], "ignore_eos": False},
    {"temperature": 1.0, "seed": 4, "min_tokens": 40, "ignore_eos": False},
    {"temperature": 0.0},
]


class DirectLink:
    """Calls the supervisor as its Triton model does."""

    def __init__(self, supervisor: EngineSupervisor) -> None:
        self._supervisor = supervisor

    async def prefill(self, spec: wire.SequenceSpec, worker: str | None) -> Any:
        raise NotImplementedError

    async def decode(
        self, spec: wire.SequenceSpec, handle: bytes, worker: str | None
    ) -> wire.Admitted:
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[wire.Reply] = loop.create_future()

        def answer(reply: wire.Reply) -> None:
            loop.call_soon_threadsafe(lambda: answered.done() or answered.set_result(reply))

        payload = wire.encode(spec)
        await asyncio.to_thread(self._supervisor.submit, payload, handle, answer)
        reply = await answered
        if reply.error:
            raise from_wire(reply.error, reply.message)
        return wire.decoder(wire.Admitted).decode(reply.result)


class Answer:
    def __init__(self) -> None:
        self.ids: list[int] = []
        self.text = ""
        self.logprobs: list[float] = []
        self.usage: Usage | None = None
        self.error: TandemError | None = None
        self.has_begun = asyncio.Event()

    def send(self, response: Response) -> None:
        self.ids += response.output_ids or []
        self.logprobs += response.logprobs or []
        self.text += response.text
        self.has_begun.set()

    def send_final(self, response: Response, usage: Usage) -> None:
        self.send(response)
        self.usage = usage

    def fail(self, error: TandemError) -> None:
        self.error = error
        self.has_begun.set()

    def is_cancelled(self) -> bool:
        return False


class Deployed:
    def __init__(self, orchestrator: Orchestrator, metrics: MetricsBuffer) -> None:
        self.orchestrator = orchestrator
        self.metrics = metrics

    def start(self, prompt_ids: list[int], **fields: Any) -> tuple[asyncio.Task[None], Answer]:
        answer = Answer()
        inputs = {"input_ids": np.array(prompt_ids, np.int32)}
        fields = {"stream": True, "ignore_eos": True, "return_output_ids": True} | fields
        parameters = {"sampling_parameters": json.dumps(fields)}
        return asyncio.create_task(self.orchestrator.serve(inputs, parameters, answer)), answer

    def start_innocent(self) -> list[tuple[asyncio.Task[None], Answer]]:
        return [
            self.start(innocent_prompt(index), max_tokens=60, **sampling)
            for index, sampling in enumerate(SAMPLING)
        ]


def innocent_prompt(index: int) -> list[int]:
    return random.Random(index).sample(range(20, 250), 40)


async def finish(tasks: list[asyncio.Task[None]]) -> None:
    await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)


@asynccontextmanager
async def deployed(model: Path, runtime_dir: Path) -> AsyncIterator[Deployed]:
    deployment = Deployment(model=str(model), runtime_dir=str(runtime_dir), secret=b"s")
    metrics = MetricsBuffer()
    config = EngineConfig(
        deployment=deployment,
        settings=EngineSettings(
            role=Role.DECODE, dtype="float32", max_model_len=512, kv_cache_mb=16
        ),
        worker="decode_0_0",
        device="cpu",
        channel=f"ipc://{runtime_dir}/e",
    )
    program = str(Path(__file__).with_name("faulty_engine.py"))
    supervisor = EngineSupervisor(
        config,
        metrics,
        command=[sys.executable, program],
        clock=itertools.count(step=1000).__next__,  # each life is long: the next starts at once
    )
    await asyncio.to_thread(supervisor.start)
    listener = IpcListener(str(runtime_dir), "llm_0_0")
    plane = StreamPlane("llm_0_0", listener, worker_timeout_s=10)
    plane.start()
    tokenizer = Tokenizer(str(model))
    orchestrator = Orchestrator(
        settings=OrchestratorSettings(policy=Policy.NEVER, max_model_len=512),
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer,
        defaults=SamplingDefaults(),
        link=DirectLink(supervisor),
        plane=plane,
        metrics=metrics,
    )
    try:
        yield Deployed(orchestrator, metrics)
    finally:
        await asyncio.to_thread(supervisor.stop)
        await plane.stop()
        orchestrator.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    write_byte_level(directory)
    vocab = json.loads((directory / "tokenizer.json").read_text())
    ids = {*vocab["model"]["vocab"].values(), *(t["id"] for t in vocab["added_tokens"])}
    return build_tiny("llama", directory, vocab_size=max(ids) + 1)


async def test_a_request_that_breaks_the_step(model: Path, tmp_path: Path) -> None:
    async with deployed(model, tmp_path) as server:
        undisturbed = server.start_innocent()
        await finish([task for task, _ in undisturbed])
        disturbed = server.start_innocent()
        for _, answer in disturbed:
            await asyncio.wait_for(answer.has_begun.wait(), PATIENCE_S)
        assert not any(task.done() for task, _ in disturbed[:3]), "the test's premise"
        poison = server.start([POISON] * NUM_POISON, max_tokens=4)
        await finish([task for task, _ in [poison, *disturbed]])

        error = poison[1].error
        assert isinstance(error, EngineFault) and "2 engines died" in str(error)
        for (_, got), (_, wanted) in zip(disturbed, undisturbed, strict=True):
            assert got.error is None and wanted.error is None
            assert (got.ids, got.text) == (wanted.ids, wanted.text)
            assert got.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)
            assert got.usage is not None and wanted.usage is not None
            assert got.usage.finish_reason == wanted.usage.finish_reason
        counters = server.metrics.drain()[0]
        assert counters[Key("tandem_engine_restarts_total")] == 2
        assert counters[Key("tandem_requests_total", "INTERNAL")] == 1
