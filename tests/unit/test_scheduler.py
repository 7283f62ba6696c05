import random
from collections import Counter
from typing import Any

import pytest

from tandem.engine.scheduler import AGEING_TOKENS_PER_S, Schedule, Scheduler
from tandem.engine.sequence import Sequence, Status
from tandem.kv.block_manager import BlockManager
from tandem.kv.handle import VERSION, KVHandle
from tandem.types import FinishReason, SamplingParams
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


class Engine:
    """A scheduler and a fake compute: every computed sequence gets the token ``next_token``."""

    def __init__(
        self, num_blocks: int = 32, max_num_seqs: int = 8, max_num_batched_tokens: int = 16
    ) -> None:
        self.blocks = BlockManager(num_blocks)
        self.scheduler = Scheduler(self.blocks, BLOCK_SIZE, max_num_seqs, max_num_batched_tokens)
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
        )
        handle = _handle(len(prompt) + len(output) - 1) if is_pulled else None
        sequence = Sequence(self.num_added, spec, arrived_s=self.now_s, handle=handle)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> Schedule:
        """Schedules and computes. Pulls end in their own time: ``scheduler.pulled``."""
        schedule = self.scheduler.schedule(self.now_s)
        for sequence, num_tokens in schedule.slices:
            will_sample = num_tokens == sequence.num_remaining
            self.scheduler.computed(sequence, num_tokens)
            if not will_sample:
                continue
            self.scheduler.append_token(sequence, next_token(sequence))
            if sequence.finish_reason(self.max_model_len) is not None:
                self.scheduler.end(sequence)
                self.finished.append(sequence)
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


def _slices(schedule: Schedule) -> list[tuple[str, int]]:
    return [(s.spec.sequence_id, n) for s, n in schedule.slices]


# ---- budget and order ------------------------------------------------------------------------


def test_a_short_prompt_is_computed_in_one_step_and_then_decodes() -> None:
    engine = Engine()
    sequence = engine.add(6, max_tokens=3)
    assert _slices(engine.step()) == [("s1", 6)]
    assert sequence.is_decoding and sequence.status is Status.RUNNING
    assert _slices(engine.step()) == [("s1", 1)]
    assert _slices(engine.step()) == [("s1", 1)]
    assert engine.finished == [sequence] and sequence.status is Status.ENDED
    assert sequence.output_ids == expected_output(sequence)
    assert _slices(engine.step()) == []


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    engine = Engine(max_num_batched_tokens=16)
    engine.add(40)
    assert [_slices(engine.step())[0][1] for _ in range(4)] == [16, 16, 8, 1]


def test_decodes_come_first_and_prefills_get_the_rest() -> None:
    engine = Engine(max_num_batched_tokens=16)
    engine.add(4, max_tokens=10)
    engine.add(5, max_tokens=10)
    engine.step()
    engine.add(40)
    assert _slices(engine.step()) == [("s1", 1), ("s2", 1), ("s3", 14)]


def test_no_step_computes_more_than_the_budget() -> None:
    engine = Engine(num_blocks=200, max_num_seqs=12, max_num_batched_tokens=13)
    for length in (3, 50, 7, 1, 22, 9, 13, 14, 2, 31):
        engine.add(length, max_tokens=9)
    while len(engine.finished) < 10:
        schedule = engine.step()
        assert 0 < sum(n for _, n in schedule.slices) <= 13
        assert all(n >= 1 for _, n in schedule.slices)


def test_the_shortest_remaining_work_goes_first() -> None:
    engine = Engine(max_num_batched_tokens=16)
    for length in (30, 5, 12):
        engine.add(length)
    assert _slices(engine.step()) == [("s2", 5), ("s3", 11)]
    # s3 has 1 token left, then the long one gets what remains
    assert _slices(engine.step()) == [("s2", 1), ("s3", 1), ("s1", 14)]


def test_a_running_prefill_is_ranked_by_what_remains_of_it() -> None:
    engine = Engine(max_num_batched_tokens=16)
    engine.add(20)
    engine.step()
    engine.add(8)
    assert _slices(engine.step()) == [("s1", 4), ("s2", 8)]


def test_waiting_makes_a_prompt_shorter() -> None:
    engine = Engine(num_blocks=1000, max_num_batched_tokens=16)
    engine.add(100)
    engine.now_s = 99 / AGEING_TOKENS_PER_S
    engine.add(2)
    engine.step()
    assert engine.finished == [] and engine.scheduler.running[0].spec.sequence_id == "s1"


def test_a_long_prompt_does_not_starve_under_a_stream_of_short_ones() -> None:
    engine = Engine(num_blocks=1000, max_num_seqs=4, max_num_batched_tokens=8)
    long = engine.add(160, max_tokens=2)
    num_steps = 0
    while long.status is not Status.ENDED and num_steps < 400:
        engine.add(8, max_tokens=1)  # enough to fill every step by itself
        engine.step()
        engine.now_s += 0.01
        num_steps += 1
    assert long.output_ids == expected_output(long)
    # It was ahead of every newcomer after 160 / 500 s = 32 steps, and took 20 steps then.
    assert num_steps < 80


def test_num_waiting_tokens_counts_prompts_that_are_to_be_computed_here() -> None:
    engine = Engine(max_num_batched_tokens=16)
    engine.add(20)
    engine.add(30)
    engine.add(10, output=(1,), is_pulled=True)
    assert engine.scheduler.num_waiting_tokens == 50
    engine.step()
    assert engine.scheduler.num_waiting_tokens == 34
    engine.step()
    assert engine.scheduler.num_waiting_tokens == 18


# ---- admission -------------------------------------------------------------------------------


def test_at_most_max_num_seqs_run() -> None:
    engine = Engine(max_num_seqs=2)
    for _ in range(3):
        engine.add(2, max_tokens=3)
    assert _slices(engine.step()) == [("s1", 2), ("s2", 2)]
    assert [s.spec.sequence_id for s in engine.scheduler.waiting] == ["s3"]
    engine.step()
    engine.step()
    assert len(engine.finished) == 2
    assert _slices(engine.step()) == [("s3", 2)]


def test_a_sequence_that_is_being_pulled_has_a_place() -> None:
    engine = Engine(max_num_seqs=1)
    pulled = engine.add(5, output=(1,), is_pulled=True)
    engine.now_s = 1.0
    engine.add(2)
    assert engine.step().pulls == [pulled]
    assert _slices(engine.step()) == []


def test_a_sequence_gets_blocks_for_all_its_tokens_when_it_enters() -> None:
    engine = Engine(num_blocks=4, max_num_batched_tokens=4)
    sequence = engine.add(13)
    engine.step()
    assert len(sequence.block_table) == 4 and sequence.num_computed == 4


def test_admission_stops_at_the_first_that_does_not_fit() -> None:
    engine = Engine(num_blocks=8)
    engine.add(24, max_tokens=2)  # 6 blocks
    engine.step()
    big = engine.add(12)  # 3 blocks
    engine.now_s = 1.0
    small = engine.add(2)
    engine.step()
    assert engine.scheduler.waiting == [big, small], "the older one must not be passed by"


def test_a_newcomer_leaves_a_block_for_each_decoding_sequence() -> None:
    engine = Engine(num_blocks=4)
    engine.add(4, max_tokens=9)
    engine.step()
    newcomer = engine.add(8)  # 2 blocks: all that is left once the other has its second
    engine.step()
    assert engine.blocks.num_available == 2
    assert newcomer.status is Status.WAITING
    engine.scheduler.end(newcomer)
    other = engine.add(4)
    engine.step()
    assert other.status is not Status.WAITING


def test_an_empty_engine_admits_a_sequence_that_needs_every_block() -> None:
    engine = Engine(num_blocks=4)
    sequence = engine.add(16, max_tokens=1)
    engine.step()
    assert engine.finished == [sequence]


def test_when_a_sequence_first_got_blocks_is_noted_once() -> None:
    engine = Engine()
    engine.now_s = 5.0
    sequence = engine.add(3)
    assert sequence.scheduled_s is None
    engine.now_s = 6.0
    engine.step()
    engine.now_s = 7.0
    engine.step()
    assert sequence.scheduled_s == 6.0


# ---- prefix cache ----------------------------------------------------------------------------


def test_a_known_prefix_is_not_computed_again() -> None:
    engine = Engine()
    engine.add([*range(10)], max_tokens=1)
    engine.step()
    second = engine.add([*range(10), 77, 78], max_tokens=1)
    assert _slices(engine.step()) == [("s2", 4)]
    assert second.num_cached == 8
    assert second.output_ids == expected_output(second)


def test_the_last_token_is_always_computed() -> None:
    engine = Engine()
    for _ in range(2):
        engine.add([*range(8)], max_tokens=1)
        engine.step()
    first, second = engine.finished
    assert (first.num_cached, second.num_cached) == (0, 4)
    assert second.output_ids == expected_output(second) == first.output_ids


def test_output_tokens_are_cached_too() -> None:
    """A conversation's next turn begins with the last answer."""
    engine = Engine()
    first = engine.add([*range(6)], max_tokens=7)
    while first.status is not Status.ENDED:
        engine.step()
    second = engine.add([*first.token_ids, 5, 6], max_tokens=1)
    engine.step()
    assert second.num_cached == 12  # of 13; the KV of the last output token was never computed
    assert second.output_ids == expected_output(second)


def test_two_running_sequences_share_their_prefix() -> None:
    engine = Engine()
    first = engine.add([*range(9)], max_tokens=5)
    engine.step()
    second = engine.add([*range(9)], max_tokens=5)
    engine.step()
    assert second.block_table[:2] == first.block_table[:2]
    assert second.block_table[2] != first.block_table[2]
    while len(engine.finished) < 2:
        engine.step()
    assert first.output_ids == second.output_ids == expected_output(first)
    assert engine.blocks.counts().used == 0


def test_prefix_blocks_in_use_need_no_room() -> None:
    engine = Engine(num_blocks=5)
    engine.add([*range(8)], max_tokens=9)
    engine.step()
    # Of the 2 blocks that are left one stays in reserve; without the prefix it would need both.
    second = engine.add([*range(8)], max_tokens=1)
    engine.step()
    assert second.status is Status.ENDED


# ---- the end of the output -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "changes", "expected"),
    [
        ([5], {}, None),
        ([5, 6, 7], {}, FinishReason.LENGTH),
        ([5, 9], {}, FinishReason.STOP),
        ([5, 6, 9], {}, FinishReason.STOP),
        ([9], {"min_tokens": 1}, None),
        ([5, 9], {"min_tokens": 1}, FinishReason.STOP),
        ([5, 6, 9], {"min_tokens": 3}, FinishReason.LENGTH),
        ([9, 5], {"min_tokens": 1}, None),
        ([9], {"stop_token_ids": ()}, None),
    ],
)
def test_why_a_token_is_the_last(
    output: list[int], changes: dict[str, Any], expected: FinishReason | None
) -> None:
    sampling = SamplingParams(**({"max_tokens": 3, "stop_token_ids": (9,)} | changes))
    spec = SequenceSpec(sequence_id="s", reply_to="o", prompt_ids=(9, 9), sampling=sampling)
    sequence = Sequence(1, spec, arrived_s=0.0)
    sequence.token_ids += output
    assert sequence.finish_reason(max_model_len=100) is expected
    if expected is None:
        assert sequence.finish_reason(len(sequence.token_ids)) is FinishReason.LENGTH


# ---- preemption ------------------------------------------------------------------------------


def test_the_youngest_is_preempted_when_blocks_run_out_and_completes_later() -> None:
    engine = Engine(num_blocks=4)
    old, young = engine.add(4, max_tokens=12), engine.add(4, max_tokens=12)
    while not engine.scheduler.num_preemptions:
        schedule = engine.step()
    assert [s for s, _ in schedule.slices] == [old]
    assert young.status is Status.WAITING and young.block_table == []
    assert young.num_remaining == engine.scheduler.num_waiting_tokens == len(young.token_ids)
    engine.now_s = 5.0
    while len(engine.finished) < 2:
        engine.step()
    assert young.scheduled_s == 0.0, "when it first got blocks"
    assert engine.finished == [old, young]
    assert old.output_ids == expected_output(old)
    assert young.output_ids == expected_output(young)


def test_a_prefilling_sequence_is_preempted_before_older_ones_that_decode() -> None:
    engine = Engine(num_blocks=6, max_num_batched_tokens=4)
    old = engine.add(3, max_tokens=12)
    engine.step()
    young = engine.add(16, max_tokens=1)  # with the reserve of 1 all that is left
    while old.status is not Status.ENDED:
        engine.step()
    assert engine.scheduler.num_preemptions
    while young.status is not Status.ENDED:
        engine.step()
    assert old.output_ids == expected_output(old)
    assert young.output_ids == expected_output(young)


def test_a_preempted_pull_is_computed_here_the_next_time() -> None:
    engine = Engine(num_blocks=4)
    old = engine.add(4, max_tokens=8)
    pulled = engine.add(4, max_tokens=8, output=(11,), is_pulled=True)
    assert engine.step().pulls == [pulled]
    engine.scheduler.pulled(pulled)
    while len(engine.finished) < 2:
        assert engine.step().pulls == []
    assert engine.scheduler.num_preemptions
    assert pulled.handle is None
    for sequence in (old, pulled):
        assert sequence.output_ids == expected_output(sequence)


def test_a_lone_sequence_waits_for_leased_blocks() -> None:
    engine = Engine(num_blocks=3)
    leased = engine.add(4, max_tokens=2)
    engine.step()
    blocks = engine.scheduler.end_leased(leased)
    sequence = engine.add(8, max_tokens=4)
    engine.step()
    assert _slices(engine.step()) == [], "its third block is leased"
    assert sequence.status is Status.WAITING
    engine.blocks.unlease(blocks)
    while sequence.status is not Status.ENDED:
        assert engine.step().slices
    assert sequence.output_ids == expected_output(sequence)


# ---- pulls and ends --------------------------------------------------------------------------


def test_a_pull_starts_at_once_even_without_budget() -> None:
    engine = Engine(max_num_batched_tokens=4)
    engine.add(4)
    pulled = engine.add(9, output=(3,), is_pulled=True)
    schedule = engine.step()
    assert _slices(schedule) == [("s1", 4)]
    assert schedule.pulls == [pulled]
    assert pulled.status is Status.PULLING and len(pulled.block_table) == 3


def test_a_pulled_sequence_decodes_from_its_newest_token() -> None:
    engine = Engine()
    pulled = engine.add([*range(9)], max_tokens=3, output=(3,), is_pulled=True)
    assert _slices(engine.step()) == []
    engine.scheduler.pulled(pulled)
    assert pulled.is_decoding and pulled.num_computed == 9
    assert _slices(engine.step()) == [("s1", 1)]
    engine.step()
    assert pulled.output_ids == expected_output(pulled)
    again = engine.add([*range(9)], max_tokens=1)
    engine.step()
    assert again.num_cached == 8, "what was pulled can be shared"


def test_a_pull_takes_what_the_prefix_cache_has() -> None:
    engine = Engine()
    engine.add([*range(9)], max_tokens=1)
    engine.step()
    pulled = engine.add([*range(9)], max_tokens=3, output=(3,), is_pulled=True)
    engine.step()
    assert pulled.num_cached == pulled.num_computed == 8


def test_blocks_that_are_being_pulled_are_not_shared_yet() -> None:
    engine = Engine()
    pulled = engine.add([*range(9)], output=(3,), is_pulled=True)
    engine.step()
    other = engine.add([*range(9)])
    engine.step()
    assert other.num_cached == 0
    engine.scheduler.end(pulled)  # failed: what is in the blocks is garbage
    third = engine.add([*range(100, 109)])
    engine.step()
    assert third.num_cached == 0
    engine.blocks.check()


@pytest.mark.parametrize("status", [Status.WAITING, Status.PULLING, Status.RUNNING])
def test_a_sequence_may_end_in_any_status(status: Status) -> None:
    engine = Engine(max_num_batched_tokens=4)
    sequence = engine.add(9, output=(3,), is_pulled=status is Status.PULLING)
    if status is not Status.WAITING:
        engine.step()
    assert sequence.status is status
    engine.scheduler.end(sequence)
    assert sequence.status is Status.ENDED and sequence.block_table == []
    assert not (engine.scheduler.waiting + engine.scheduler.pulling + engine.scheduler.running)
    assert engine.blocks.counts().used == 0
    engine.blocks.check()


def test_a_leased_sequence_leaves_its_blocks_to_the_lease() -> None:
    engine = Engine()
    sequence = engine.add(6, max_tokens=9)
    engine.step()
    blocks = engine.scheduler.end_leased(sequence)
    assert len(blocks) == 2 and sequence.status is Status.ENDED
    assert engine.scheduler.running == [] and sequence.block_table == []
    counts = engine.blocks.counts()
    assert (counts.leased, counts.used) == (2, 0)


# ---- whole runs ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(25))
def test_every_sequence_completes_with_its_own_tokens(seed: int) -> None:
    """Random arrivals, lengths, shared prefixes, pulls that take a while, cancels, leases."""
    draw = random.Random(seed)
    engine = Engine(
        num_blocks=draw.randint(10, 24),
        max_num_seqs=draw.randint(1, 8),
        max_num_batched_tokens=draw.randint(8, 24),
    )
    prefix = [draw.randrange(1000) for _ in range(16)]
    pulls: list[tuple[int, Sequence]] = []  # the step in which it ends
    leases: list[tuple[int, list[int]]] = []
    done: Counter[str] = Counter()
    num_left, step = 25, 0
    scheduler = engine.scheduler
    while num_left or scheduler.waiting or scheduler.running or scheduler.pulling or leases:
        step += 1
        assert step < 3000, "nothing moves any more"
        engine.now_s += 0.01
        if num_left and draw.random() < 0.4:
            num_left -= 1
            prompt = prefix[: draw.choice([0, 3, 8, 16])] + [
                draw.randrange(1000) for _ in range(draw.randint(1, 12))
            ]
            is_pulled = draw.random() < 0.4
            sequence = engine.add(
                prompt,
                max_tokens=draw.randint(2, 10),
                output=(next_token_of(prompt),) if is_pulled else (),
                is_pulled=is_pulled,
            )
        preemptions = scheduler.num_preemptions
        running = [*scheduler.running]
        schedule = engine.step()
        in_step = {s for s, _ in schedule.slices}
        assert len(in_step) == len(schedule.slices)
        assert len(scheduler.running) + len(scheduler.pulling) <= 8
        if scheduler.num_preemptions > preemptions:
            preempted = {s for s in running if s.status is Status.WAITING}
            assert preempted and not preempted & in_step
            assert len(preempted) == scheduler.num_preemptions - preemptions
        pulls += [(step + draw.randint(0, 4), s) for s in schedule.pulls]
        for end, sequence in [*pulls]:
            if end <= step:
                pulls.remove((end, sequence))
                scheduler.pulled(sequence)
        for end, blocks in [*leases]:
            if end <= step:
                leases.remove((end, blocks))
                engine.blocks.unlease(blocks)
        if draw.random() < 0.05 and scheduler.running:
            victim = draw.choice(scheduler.running)
            if victim.is_decoding:
                leases.append((step + 5, scheduler.end_leased(victim)))
                done["leased"] += 1
        if draw.random() < 0.03 and scheduler.waiting:
            scheduler.end(draw.choice(scheduler.waiting))
            done["cancelled"] += 1
        engine.blocks.check()
    assert len(engine.finished) + done.total() == 25
    for sequence in engine.finished:
        assert sequence.output_ids == expected_output(sequence)
        assert sequence.finish_reason(engine.max_model_len) is FinishReason.LENGTH
    counts = engine.blocks.counts()
    assert counts.free + counts.cached == engine.blocks.num_blocks


def test_the_random_runs_do_preempt() -> None:
    """Or else they would prove less than they say: tight blocks, long outputs."""
    engine = Engine(num_blocks=10, max_num_seqs=8)
    for _ in range(8):
        engine.add(3, max_tokens=25)
    while len(engine.finished) < 8:
        engine.step()
    assert engine.scheduler.num_preemptions >= 3
    for sequence in engine.finished:
        assert sequence.output_ids == expected_output(sequence)
