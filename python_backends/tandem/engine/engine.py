"""One engine: sequences in, tokens and KV handles out. No sockets, no processes, no threads.

``step`` reads: schedule, build, forward, sample, emit. What it needs from outside comes through
the constructor, so that a test drives two engines in one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from tandem import wire
from tandem.engine.admission import Admission, EngineLimits
from tandem.engine.batch_builder import build_batch
from tandem.engine.exports import Exports
from tandem.engine.imports import Imports, PullDone
from tandem.engine.model_runner import ModelRunner
from tandem.engine.outbox import Outbox
from tandem.engine.sampler import Sampled, SampleRequest, sample
from tandem.engine.scheduler import Scheduler
from tandem.engine.sequence import Sequence, Status
from tandem.errors import RequestCancelled, TandemError, Unavailable, to_wire
from tandem.kv.block_manager import BlockManager
from tandem.kv.lease_board import Lease
from tandem.types import Load, Role


class Engine:
    """Owned by the engine loop's thread. A *prefill* engine ends a sequence with its first token
    and a lease on its blocks; a *decode* engine runs it to its end.
    """

    def __init__(
        self,
        *,
        worker: str,
        incarnation: str,
        limits: EngineLimits,
        runner: ModelRunner,
        blocks: BlockManager,
        scheduler: Scheduler,
        exports: Exports,
        imports: Imports,
        outbox: Outbox,
        clock: Callable[[], float],
    ) -> None:
        self.worker = worker
        self._incarnation = incarnation
        self._limits = limits
        self._runner = runner
        self._blocks = blocks
        self._scheduler = scheduler
        self._exports = exports
        self._imports = imports
        self._admission = Admission(limits, imports)
        self._outbox = outbox
        self._clock = clock
        self._sequences: dict[str, Sequence] = {}
        self._totals: dict[str, float] = {}

    # ---- what comes in -----------------------------------------------------------------

    def submit(self, message: wire.Submit) -> None:
        """Takes a sequence, or answers at once why not."""
        try:
            spec, handle = self._admission.admit(message, self._sequences)
        except TandemError as error:
            self._fail_call(message.call_id, error)
            self._outbox.to_shim(wire.Left(call_id=message.call_id))
            return
        sequence = Sequence(message.call_id, spec, arrived_s=self._clock(), handle=handle)
        self._outbox.meet(spec.reply_to)
        self._sequences[spec.sequence_id] = sequence
        self._scheduler.add(sequence)
        if self._limits.role is Role.DECODE and handle is None:
            admitted = wire.Admitted(worker=self.worker, incarnation=self._incarnation)
            self._reply(sequence, admitted)

    def cancel(self, sequence_ids: Iterable[str]) -> None:
        """Frees whatever these sequences hold here; one that is not here yet will be refused."""
        for sequence_id in sequence_ids:
            sequence = self._sequences.get(sequence_id)
            if sequence is not None:
                error = RequestCancelled("cancelled by the orchestrator")
                self._fail_call(sequence.call_id, error)
                self._leave(sequence)
            elif not self._exports.revoke(sequence_id):
                self._admission.bar(sequence_id)

    def renew(self, sequence_ids: Iterable[str]) -> None:
        for sequence_id in sequence_ids:
            self._exports.renew(sequence_id)

    def orchestrator_gone(self, name: str) -> None:
        """Nobody listens any more: its sequences are dropped, its leases expire. It may have been
        stopped for a while and go on later, so it is told what it lost.
        """
        lost = [i for i, s in self._sequences.items() if s.spec.reply_to == name]
        if not lost:
            return
        self.cancel(lost)
        error, text = to_wire(Unavailable(f"worker {self.worker} did not hear from {name}"))
        failed = [wire.SequenceFailed(sequence_id=i, error=error, message=text) for i in lost]
        message = wire.StepMessage(
            worker=self.worker, incarnation=self._incarnation, load=self.load(), failed=failed
        )
        self._outbox.to_orchestrator(name, message)

    def lease_ended(self, lease: Lease, was_released: bool) -> None:
        self._exports.ended(lease)
        self._count("leases_released" if was_released else "leases_expired")

    def pull_done(self, done: PullDone) -> None:
        """The sequence joins the batch, or fails so that the orchestrator has it re-prefilled."""
        sequence = done.sequence
        self._count("pulls_ok" if done.result else "pulls_failed")
        if self._sequences.get(sequence.spec.sequence_id) is not sequence:
            if done.is_settled:  # cancelled meanwhile; its blocks were quarantined
                self._scheduler.end(sequence)
        elif done.result is None:
            assert done.error is not None
            self._fail_call(sequence.call_id, done.error)
            if done.is_settled:
                self._scheduler.end(sequence)
            self._leave(sequence)
        else:
            self._count("pulled_bytes", done.result.num_bytes)
            self._scheduler.pulled(sequence)
            assert sequence.handle is not None and sequence.scheduled_s is not None
            num_cached_blocks = sequence.num_cached // self._limits.block_size
            num_pulled = sequence.num_computed - sequence.num_cached
            self._imports.note_rate(num_pulled, done.result.seconds)
            self._reply(
                sequence,
                wire.Admitted(
                    worker=self.worker,
                    incarnation=self._incarnation,
                    num_cached_tokens=sequence.num_cached,
                    num_pulled_blocks=len(sequence.handle.block_ids) - num_cached_blocks,
                    pulled_bytes=done.result.num_bytes,
                    queue_s=sequence.scheduled_s - sequence.arrived_s,
                    pull_s=done.result.seconds,
                    transport=sequence.handle.transport,
                ),
            )

    def pull_settled(self, sequence: Sequence) -> None:
        self._scheduler.end(sequence)

    # ---- the step ----------------------------------------------------------------------

    def step(self) -> bool:
        """Computes one batch; False if there was nothing to compute."""
        began_s = self._clock()
        schedule = self._scheduler.schedule(began_s)
        for sequence in schedule.pulls:
            self._imports.start(sequence)
        if not schedule.slices:
            return False
        started_s = self._clock()
        batch = build_batch(schedule.slices, self._limits.block_size)
        logits = self._runner.forward(batch)
        finished = []
        for sequence, num_tokens in schedule.slices:
            if num_tokens == sequence.num_remaining:
                finished.append(sequence)
            self._scheduler.computed(sequence, num_tokens)
        sampled = sample(logits, [_sample_request(s) for s in finished])
        self._count("steps")
        self._count("step_seconds", self._clock() - started_s)
        self._count("computed_tokens", batch.num_tokens)
        self._emit(zip(finished, sampled, strict=True))
        self._scheduler.observe(schedule, self._clock() - began_s)
        return True

    def load(self) -> Load:
        return Load(
            role=self._limits.role,
            num_running=self._scheduler.num_running,
            num_waiting=len(self._scheduler.waiting),
            num_waiting_tokens=self._scheduler.num_waiting_tokens,
            num_free_blocks=self._blocks.num_available,
            num_blocks=self._blocks.num_blocks,
            max_num_seqs=self._scheduler.max_num_seqs,
            step_s=self._scheduler.step_s,
            prefill_tokens_per_s=self._scheduler.prefill_tokens_per_s,
            pull_tokens_per_s=self._imports.pull_tokens_per_s,
        )

    def stats(self) -> wire.Stats:
        self._totals["preemptions"] = self._scheduler.num_preemptions
        return wire.Stats(
            load=self.load(),
            blocks=self._blocks.counts()._asdict(),
            num_leases=self._exports.board.num_leases,
            totals=dict(self._totals),
        )

    # ---- helpers -----------------------------------------------------------------------

    def _emit(self, sampled: Iterable[tuple[Sequence, Sampled]]) -> None:
        """One message per orchestrator with its new tokens; a prefill engine replies instead."""
        messages: dict[str, wire.StepMessage] = {}
        load = self.load()
        for sequence, new in sampled:
            spec = sequence.spec
            self._scheduler.append_token(sequence, new.token_id)
            finish_reason = sequence.finish_reason(self._limits.max_model_len)
            event = wire.TokenEvent(
                spec.sequence_id,
                sequence.num_output - 1,
                new.token_id,
                new.logprob if spec.sampling.logprobs else None,
                finish_reason,
            )
            if self._limits.role is Role.PREFILL:
                self._finish_prefill(sequence, event)
                continue
            message = messages.get(spec.reply_to)
            if message is None:
                message = messages[spec.reply_to] = wire.StepMessage(
                    worker=self.worker,
                    incarnation=self._incarnation,
                    load=load,
                    tokens=[],
                    prefilled=[],
                )
            if sequence.num_output == len(spec.output_ids) + 1 and sequence.handle is None:
                message.prefilled.append(self._prefill_times(sequence))
            message.tokens.append(event)
            if finish_reason is not None:
                self._leave(sequence)
        for name, message in messages.items():
            self._outbox.to_orchestrator(name, message)

    def _finish_prefill(self, sequence: Sequence, event: wire.TokenEvent) -> None:
        spec = sequence.spec
        times = self._prefill_times(sequence)
        handle = b""
        if event.finish_reason is None:
            num_tokens = sequence.num_computed
            blocks = self._scheduler.end_leased(sequence)
            handle = self._exports.issue(spec.sequence_id, blocks, num_tokens, event.token_id)
        result = wire.PrefillReply(
            worker=self.worker,
            token=event,
            num_cached_tokens=times.num_cached_tokens,
            queue_s=times.queue_s,
            prefill_s=times.prefill_s,
        )
        self._reply(sequence, result, handle)
        self._leave(sequence)

    def _prefill_times(self, sequence: Sequence) -> wire.Prefilled:
        assert sequence.scheduled_s is not None
        return wire.Prefilled(
            sequence_id=sequence.spec.sequence_id,
            num_cached_tokens=sequence.num_cached,
            queue_s=sequence.scheduled_s - sequence.arrived_s,
            prefill_s=self._clock() - sequence.scheduled_s,
        )

    def _leave(self, sequence: Sequence) -> None:
        """The sequence is no longer ours; the blocks of a running pull stay until it ends. The
        last message of a call: its place is free.
        """
        del self._sequences[sequence.spec.sequence_id]
        if sequence.status not in (Status.ENDED, Status.PULLING):
            self._scheduler.end(sequence)
        self._outbox.to_shim(wire.Left(call_id=sequence.call_id))

    def _reply(self, sequence: Sequence, result: msgspec.Struct, handle: bytes = b"") -> None:
        self._outbox.to_shim(
            wire.Reply(call_id=sequence.call_id, result=wire.encode(result), handle=handle)
        )

    def _fail_call(self, call_id: int, error: TandemError) -> None:
        """A call that was answered before ignores this."""
        name, message = to_wire(error)
        self._outbox.to_shim(wire.Reply(call_id=call_id, error=name, message=message))

    def _count(self, key: str, amount: float = 1) -> None:
        self._totals[key] = self._totals.get(key, 0) + amount


def _sample_request(sequence: Sequence) -> SampleRequest:
    return SampleRequest(
        params=sequence.spec.sampling,
        prompt_ids=sequence.spec.prompt_ids,
        output_ids=sequence.output_ids,
    )
