"""µs of one step's bookkeeping, beside the least a Python scheduler does: name every sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tandem.engine.batch_builder import build_batch
from tandem.engine.scheduler import Schedule, Scheduler
from tandem.engine.sequence import Sequence
from tandem.kv.block_manager import BlockManager
from tandem.types import SamplingParams
from tandem.wire import SequenceSpec
from tandem_perf.micro.figure import Bound, Figure, MicroOptions, time_figure
from tandem_perf.micro.timing import Timing, time_repeats

_BLOCK_SIZE = 16
_MAX_OUTPUT = 512  # blocks are there for so many tokens of each sequence


@dataclass(frozen=True)
class SchedulerSizes:
    decoding: int = 1000
    waiting: tuple[int, ...] = (0, 100)
    prompt_len: int = 256


def run(options: MicroOptions) -> Iterator[Figure]:
    return measure(options, SchedulerSizes())


def measure(options: MicroOptions, sizes: SchedulerSizes) -> Iterator[Figure]:
    for num_waiting in sizes.waiting:
        bench = _SchedulerBench(sizes, num_waiting)
        least = time_repeats(bench.name_all, options.repeats, loops=20)
        bound = Bound(value=least.best_cpu_s * 1e6, reason="list of (sequence, 1)")
        load = f"{sizes.decoding} decoding, {num_waiting} waiting"
        scheduling, rest = bench.steps(options.repeats)
        for what, timing in (("schedule", scheduling), ("build and account", rest)):
            yield time_figure(
                "scheduler", f"{what}: {load}", "µs/step", timing, 1e6, bound
            )


class _SchedulerBench:
    """A full batch that decodes; whoever waits finds no place."""

    def __init__(self, sizes: SchedulerSizes, num_waiting: int) -> None:
        per_sequence = -(-(sizes.prompt_len + _BLOCK_SIZE + _MAX_OUTPUT) // _BLOCK_SIZE)
        # The budget fits every decoding sequence and a chunk of whoever waits.
        self._scheduler = Scheduler(
            BlockManager(sizes.decoding * per_sequence),
            _BLOCK_SIZE,
            max_num_seqs=sizes.decoding,
            max_num_batched_tokens=sizes.decoding + 128,
        )
        self._now_s = 0.0
        self._schedule = Schedule()
        for number in range(sizes.decoding):
            # Lengths differ, so that the sequences do not all need their next block at once.
            self._add(number, sizes.prompt_len + number % _BLOCK_SIZE)
        while self._scheduler.prefilling or self._scheduler.waiting:
            self._plan()
            self._account()
        for number in range(sizes.decoding, sizes.decoding + num_waiting):
            self._add(number, sizes.prompt_len)

    def name_all(self) -> list[tuple[Sequence, int]]:
        return [(sequence, 1) for sequence in self._scheduler.decoding]

    def steps(self, repeats: int) -> tuple[Timing, Timing]:
        """Scheduling alone, and the rest of a step's Python: batch, blocks, tokens, hashes."""
        scheduling = time_repeats(self._plan, repeats)
        return scheduling, time_repeats(self._account, repeats, prepare=self._plan)

    def _plan(self) -> None:
        self._now_s += 0.01
        self._schedule = self._scheduler.schedule(self._now_s)

    def _account(self) -> None:
        slices = self._schedule.slices
        build_batch(slices, _BLOCK_SIZE)
        for sequence, num_tokens in slices:
            is_last = num_tokens == sequence.num_remaining
            self._scheduler.computed(sequence, num_tokens)
            if is_last:
                self._scheduler.append_token(sequence, 7)

    def _add(self, number: int, length: int) -> None:
        spec = SequenceSpec(
            sequence_id=f"s{number}",
            reply_to="nobody",
            prompt_ids=tuple(range(number * 1000, number * 1000 + length)),  # no common prefix
            sampling=SamplingParams(max_tokens=1 << 30),
        )
        self._scheduler.add(Sequence(number, spec, arrived_s=self._now_s))
