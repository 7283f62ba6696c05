"""A scheduler with a fake compute and, where a test wants one, simulated time."""

from __future__ import annotations

from collections.abc import Callable

from tandem.engine.scheduler import Schedule, Scheduler
from tandem.engine.sequence import Sequence
from tandem.kv.block_manager import BlockManager
from tandem.kv.handle import VERSION, KVHandle
from tandem.types import SamplingParams
from tandem.wire import SequenceSpec

BLOCK_SIZE = 4


def _handle(num_tokens: int) -> KVHandle:
    return KVHandle(
        version=VERSION,
        incarnation="i",
        transport="shm",
        endpoint="1:1",
        fingerprint="f",
        block_ids=tuple(range(-(-num_tokens // BLOCK_SIZE))),
        num_tokens=num_tokens,
        slot=0,
        generation=1,
        expires_unix_s=1e12,
        sequence_id="s",
        first_token=0,
    )


class SimulatedEngine:
    """Every computed sequence gets the token ``next_token``. ``step_cost`` gives the seconds of a
    step from its decoding sequences and prefill tokens; without it no time passes in a step.
    """

    def __init__(
        self,
        num_blocks: int = 32,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 16,
        max_itl_s: float = 0.0,
        step_cost: Callable[[int, int], float] | None = None,
        checks_blocks: bool = True,
    ) -> None:
        self.blocks = BlockManager(num_blocks)
        self.scheduler = Scheduler(
            self.blocks, BLOCK_SIZE, max_num_seqs, max_num_batched_tokens, max_itl_s
        )
        self.step_cost = step_cost
        self.checks_blocks = checks_blocks
        self.first_token_s: dict[Sequence, float] = {}
        self.now_s = 0.0
        self.num_added = 0
        self.finished: list[Sequence] = []
        self.max_model_len = 10_000

    def add(
        self,
        prompt: int | list[int],
        *,
        max_tokens: int = 4,
        output: tuple[int, ...] = (),
        is_pulled: bool = False,
        cache_salt: str = "",
    ) -> Sequence:
        """A prompt of its own tokens where only its length is given."""
        self.num_added += 1
        if isinstance(prompt, int):
            prompt = [self.num_added * 1000 + i for i in range(prompt)]
        spec = SequenceSpec(
            sequence_id=f"s{self.num_added}",
            reply_to="o",
            prompt_ids=tuple(prompt),
            output_ids=output,
            sampling=SamplingParams(max_tokens=max_tokens),
            cache_salt=cache_salt,
        )
        handle = _handle(len(prompt) + len(output) - 1) if is_pulled else None
        sequence = Sequence(self.num_added, spec, arrived_s=self.now_s, handle=handle)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> Schedule:
        """Schedules and computes. Pulls end in their own time: ``scheduler.pulled``."""
        schedule = self.scheduler.schedule(self.now_s)
        if self.step_cost is not None and schedule.slices:
            seconds = self.step_cost(schedule.num_decoding, schedule.num_prefill_tokens)
            self.now_s += seconds
            self.scheduler.observe(schedule, seconds)
        for sequence, num_tokens in schedule.slices:
            will_sample = num_tokens == sequence.num_remaining
            self.scheduler.computed(sequence, num_tokens)
            if not will_sample:
                continue
            self.scheduler.append_token(sequence, next_token(sequence))
            self.first_token_s.setdefault(sequence, self.now_s)
            if sequence.finish_reason(self.max_model_len) is not None:
                self.scheduler.end(sequence)
                self.finished.append(sequence)
        if self.checks_blocks:
            self.blocks.check()
        return schedule


def next_token(sequence: Sequence) -> int:
    """Depends on all tokens, so that a token sampled from a wrong prefix would show."""
    return next_token_of(sequence.token_ids)


def next_token_of(tokens: list[int]) -> int:
    return (sum(tokens) * 31 + len(tokens)) % 997


def expected_output(sequence: Sequence) -> list[int]:
    tokens = [*sequence.spec.prompt_ids, *sequence.spec.output_ids]
    while len(tokens) < len(sequence.spec.prompt_ids) + sequence.spec.sampling.max_tokens:
        tokens.append(next_token_of(tokens))
    return tokens[len(sequence.spec.prompt_ids) :]
