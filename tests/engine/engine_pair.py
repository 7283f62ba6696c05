"""A prefill and a decode engine in one thread, over the in-process transport: no Triton, no zmq."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from gpu_transport import GpuTransport
from tandem import wire
from tandem.config import EngineSettings
from tandem.engine.build import build_engine, export_memory
from tandem.engine.engine import Engine
from tandem.engine.imports import PullDone, PullSettled
from tandem.engine.model import LoadedModel
from tandem.errors import TandemError, from_wire
from tandem.transport.in_process import InProcessTransport
from tandem.types import FinishReason, Role, SamplingParams

BLOCK_SIZE = 16
CHUNK = 32
SECRET = b"the tests' secret"


class Clock:
    """Time that only a test moves; a tick per reading keeps events ordered."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        self.now_s += 1e-6
        return self.now_s


@dataclass(eq=False)
class Host:
    """One engine with everything it said."""

    role: Role
    model: LoadedModel
    transport: InProcessTransport
    clock: Clock
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        values: dict[str, Any] = {
            "role": self.role,
            "block_size": BLOCK_SIZE,
            "max_num_batched_tokens": CHUNK,
            "max_num_seqs": 32,
            "max_model_len": self.model.limits.max_position_embeddings,
            "kv_cache_mb": 16,
        }
        settings = EngineSettings(**(values | self.settings))
        self.replies: dict[int, wire.Reply] = {}
        self.left: list[int] = []
        self.tokens: dict[str, list[wire.TokenEvent]] = defaultdict(list)
        self.met: set[str] = set()
        self._pulls: list[PullDone | PullSettled] = []
        self._held_pulls: list[Any] = []
        self.holds_pulls = False
        self.memory = export_memory(settings, self.model, self.transport, self.clock)
        self.engine: Engine = build_engine(
            settings,
            self.model,
            self.memory,
            worker=f"{self.role}_0",
            fingerprint="same",
            secret=SECRET,
            outbox=self,
            spawn=self._spawn,
            done=self._pulls.append,
            clock=self.clock,
        )

    # ---- Outbox ------------------------------------------------------------------------

    def to_shim(self, message: wire.Reply | wire.Left | wire.Stats | wire.Ready) -> None:
        if isinstance(message, wire.Reply):
            self.replies.setdefault(message.call_id, message)
        elif isinstance(message, wire.Left):
            self.left.append(message.call_id)

    def to_orchestrator(self, name: str, message: wire.StepMessage) -> None:
        for event in message.tokens:
            self.tokens[event.sequence_id].append(event)

    def meet(self, name: str) -> None:
        self.met.add(name)

    # ---- driving -----------------------------------------------------------------------

    def _spawn(self, run: Any) -> None:
        if self.holds_pulls:
            self._held_pulls.append(run)
        else:
            run()

    def release_pulls(self) -> None:
        self.holds_pulls = False
        for run in self._held_pulls:
            run()
        self._held_pulls.clear()

    def step(self) -> bool:
        """Events first, as the engine loop does, then one step."""
        for lease, was_released in self.memory.board.collect():
            self.engine.lease_ended(lease, was_released)
        had_pulls = bool(self._pulls)
        while self._pulls:
            event = self._pulls.pop(0)
            if isinstance(event, PullDone):
                self.engine.pull_done(event)
            else:
                self.engine.pull_settled(event.sequence)
        return self.engine.step() or had_pulls or bool(self._pulls)

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.step():
                return
        raise AssertionError("the engine does not come to rest")

    @property
    def blocks(self) -> dict[str, int]:
        counts = self.engine.stats().blocks
        assert sum(counts.values()) == self.engine.load().num_blocks
        return counts

    @property
    def is_empty(self) -> bool:
        """Nothing is held: every block is free or only cached."""
        return self.blocks["used"] == self.blocks["leased"] == 0

    def result(self, call_id: int, kind: type[Any]) -> Any:
        reply = self.replies[call_id]
        if reply.error:
            raise from_wire(reply.error, reply.message)
        return wire.decoder(kind).decode(reply.result)

    def error(self, call_id: int) -> TandemError:
        reply = self.replies[call_id]
        return from_wire(reply.error, reply.message)


@dataclass
class Output:
    token_ids: list[int]
    logprobs: list[float | None]
    finish_reason: FinishReason | None
    num_cached_tokens: int = 0


class EnginePair:
    def __init__(self, model: LoadedModel, **settings: Any) -> None:
        self.clock = Clock()
        on_cpu = model.device.type == "cpu"
        self.transport = InProcessTransport() if on_cpu else GpuTransport()
        self.prefill = Host(Role.PREFILL, model, self.transport, self.clock, settings)
        self.decode = Host(Role.DECODE, model, self.transport, self.clock, settings)
        self._ids = itertools.count(1)

    def replaced(self, host: Host) -> Host:
        """A new engine for one that died with all it held."""
        host.memory.region.close()
        return Host(host.role, host.model, host.transport, host.clock, host.settings)

    def spec(
        self, prompt_ids: list[int], output_ids: list[int] | None = None, **sampling: Any
    ) -> wire.SequenceSpec:
        return wire.SequenceSpec(
            sequence_id=f"s{next(self._ids)}",
            reply_to="llm_0_0",
            prompt_ids=tuple(prompt_ids),
            output_ids=tuple(output_ids or ()),
            sampling=SamplingParams(**({"max_tokens": 8} | sampling)),
        )

    def submit(self, host: Host, spec: wire.SequenceSpec, handle: bytes = b"") -> int:
        call_id = next(self._ids)
        host.engine.submit(wire.Submit(call_id=call_id, spec=wire.encode(spec), handle=handle))
        return call_id

    def serve(self, specs: list[wire.SequenceSpec], remote: list[bool]) -> list[Output]:
        """Runs all of them at once, each on its path, to their end."""
        calls = {
            spec.sequence_id: self.submit(self.prefill if is_remote else self.decode, spec)
            for spec, is_remote in zip(specs, remote, strict=True)
        }
        first: dict[str, wire.PrefillReply] = {}
        handed_over: set[str] = set()
        for _ in range(10_000):
            did_work = [self.prefill.step(), self.decode.step()]
            for spec, is_remote in zip(specs, remote, strict=True):
                call_id = calls[spec.sequence_id]
                if not is_remote or spec.sequence_id in handed_over:
                    continue
                if call_id in self.prefill.replies:
                    handed_over.add(spec.sequence_id)
                    reply = self.prefill.result(call_id, wire.PrefillReply)
                    first[spec.sequence_id] = reply
                    handle = self.prefill.replies[call_id].handle
                    if handle:
                        after_first = wire.SequenceSpec(
                            sequence_id=spec.sequence_id,
                            reply_to=spec.reply_to,
                            prompt_ids=spec.prompt_ids,
                            output_ids=(*spec.output_ids, reply.token.token_id),
                            sampling=spec.sampling,
                        )
                        self.submit(self.decode, after_first, handle)
                    did_work.append(True)
            if not any(did_work):
                break
        else:
            raise AssertionError("the engines do not come to rest")
        return [self._output(spec, first.get(spec.sequence_id)) for spec in specs]

    def _output(self, spec: wire.SequenceSpec, first: wire.PrefillReply | None) -> Output:
        events = list(self.decode.tokens[spec.sequence_id])
        if first is not None:
            events.insert(0, first.token)
        positions = [event.position for event in events]
        start = len(spec.output_ids)
        assert positions == list(range(start, start + len(events))), positions
        return Output(
            token_ids=[event.token_id for event in events],
            logprobs=[event.logprob for event in events],
            finish_reason=events[-1].finish_reason if events else None,
            num_cached_tokens=first.num_cached_tokens if first else 0,
        )
