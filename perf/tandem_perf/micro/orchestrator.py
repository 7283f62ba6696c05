"""µs per token of the orchestrator: ZeroMQ message → stream → generation → text → responder."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection

from tandem import wire
from tandem.errors import TandemError
from tandem.metrics import MetricsBuffer
from tandem.orchestrator.generate_request import GenerateRequest
from tandem.orchestrator.generation import Generation
from tandem.orchestrator.responder import Response, Usage
from tandem.orchestrator.stream_listener import IpcListener
from tandem.orchestrator.stream_plane import StreamPlane, TokenStream
from tandem.orchestrator.text_assembler import TextAssembler
from tandem.orchestrator.tokenizer import Tokenizer
from tandem.types import FinishReason, Load, Role, SamplingParams
from tandem_perf.micro.fake_engine import fake_engine
from tandem_perf.micro.figure import Bound, Figure, MicroOptions, time_figure
from tandem_perf.micro.timing import Timing, time_repeats

_NAME = "llm_0_0"
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class OrchestratorSizes:
    """``pause_s`` between steps: none (the orchestrator is the bottleneck), or as engines step."""

    streams: int = 32
    steps: int = 200
    pauses_s: tuple[float, ...] = (0.0, 0.01)


def run(options: MicroOptions) -> Iterator[Figure]:
    return measure(options, OrchestratorSizes())


def measure(options: MicroOptions, sizes: OrchestratorSizes) -> Iterator[Figure]:
    tokenizer = Tokenizer(options.model_dir)
    payloads = step_payloads(sizes, tokenizer.vocab_size)
    num_tokens = sizes.streams * sizes.steps
    decode = wire.decoder(wire.StepMessage).decode
    least = time_repeats(lambda: [decode(payload) for payload in payloads], options.repeats)
    floor_us = least.best_cpu_s / num_tokens * 1e6
    bound = Bound(value=floor_us, reason="msgpack decoding of the messages")
    for pause_s in sizes.pauses_s:
        timing = _streams(tokenizer, payloads, sizes, pause_s, options.repeats)
        pace = f"a step every {pause_s * 1e3:g} ms" if pause_s else "back to back"
        what = f"{sizes.streams} streams, {pace}, CPU of the process"
        yield time_figure("orchestrator", what, "µs/token", timing, 1e6 / num_tokens, bound)


def step_payloads(sizes: OrchestratorSizes, vocab_size: int) -> list[bytes]:
    """The messages of one run: a token for every stream a step, the last ones final."""
    draw = random.Random(0)
    messages = []
    for step in range(sizes.steps):
        reason = FinishReason.LENGTH if step == sizes.steps - 1 else None
        tokens = [
            wire.TokenEvent(f"s{i}", step, draw.randrange(vocab_size), None, reason)
            for i in range(sizes.streams)
        ]
        messages.append(
            wire.StepMessage(
                worker="decode_0_0", incarnation="aa", load=Load(role=Role.DECODE), tokens=tokens
            )
        )
    return [wire.encode(message) for message in messages]


def _streams(
    tokenizer: Tokenizer,
    payloads: list[bytes],
    sizes: OrchestratorSizes,
    pause_s: float,
    repeats: int,
) -> Timing:
    """CPU seconds of this process per run, ZeroMQ's I/O thread included: wall time would be the
    pauses of the engine, and the noise of the machine.
    """
    seconds: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        with fake_engine(f"ipc://{folder}/stream-{_NAME}", payloads, pause_s) as start_engine:
            for _ in range(repeats + 1):
                seconds.append(asyncio.run(_one_run(tokenizer, sizes, folder, start_engine)))
    return Timing(tuple(seconds[1:]), tuple(seconds[1:]))


async def _one_run(
    tokenizer: Tokenizer, sizes: OrchestratorSizes, folder: str, start_engine: Connection
) -> float:
    listener = IpcListener(folder, _NAME)
    plane = StreamPlane(_NAME, listener, worker_timeout_s=_TIMEOUT_S)
    plane.start()
    try:
        streams = [plane.open(f"s{i}") for i in range(sizes.streams)]
        generations = [_generation(tokenizer) for _ in streams]
        start_engine.send(True)
        cpu_s = time.process_time()
        async with asyncio.timeout(_TIMEOUT_S), asyncio.TaskGroup() as group:
            for stream, generation in zip(streams, generations, strict=True):
                group.create_task(_serve(stream, generation))
        return time.process_time() - cpu_s
    finally:
        await plane.stop()


async def _serve(stream: TokenStream, generation: Generation) -> None:
    """The inner loop of ``Orchestrator``."""
    while generation.finish_reason is None:
        event = await stream.get()
        assert isinstance(event, wire.TokenEvent)
        generation.take(event)


class _Responder:
    """Where Triton's response sender would be."""

    def send(self, response: Response) -> None: ...
    def send_final(self, response: Response, usage: Usage) -> None: ...
    def fail(self, error: TandemError) -> None:
        raise error

    def is_cancelled(self) -> bool:
        return False


def _generation(tokenizer: Tokenizer) -> Generation:
    return Generation(
        request=GenerateRequest(text_input="", stream=True),
        prompt_ids=(1,),
        sampling=SamplingParams(max_tokens=1 << 30),
        assembler=TextAssembler(tokenizer, ()),
        responder=_Responder(),
        metrics=MetricsBuffer(),
        clock=time.monotonic,
        arrived_s=time.monotonic(),
    )
