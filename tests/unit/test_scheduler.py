import random
from collections import Counter
from typing import Any

import pytest

from simulated_engine import SimulatedEngine, expected_output, next_token_of
from tandem.engine.scheduler import OLDEST_SHARE, Schedule
from tandem.engine.sequence import Sequence, Status
from tandem.types import FinishReason, SamplingParams
from tandem.wire import SequenceSpec


def _slices(schedule: Schedule) -> list[tuple[str, int]]:
    return [(s.spec.sequence_id, n) for s, n in schedule.slices]


# ---- budget and order ------------------------------------------------------------------------


def test_a_short_prompt_is_computed_in_one_step_and_then_decodes() -> None:
    engine = SimulatedEngine()
    sequence = engine.add(6, max_tokens=3)
    assert _slices(engine.step()) == [("s1", 6)]
    assert sequence.is_decoding
    assert _slices(engine.step()) == [("s1", 1)]
    assert _slices(engine.step()) == [("s1", 1)]
    assert engine.finished == [sequence] and sequence.status is Status.ENDED
    assert sequence.output_ids == expected_output(sequence)
    assert _slices(engine.step()) == []


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    engine = SimulatedEngine(max_num_batched_tokens=16)
    engine.add(40)
    assert [_slices(engine.step())[0][1] for _ in range(4)] == [16, 16, 8, 1]


def test_decodes_come_first_and_prefills_get_the_rest() -> None:
    engine = SimulatedEngine(max_num_batched_tokens=16)
    engine.add(4, max_tokens=10)
    engine.add(5, max_tokens=10)
    engine.step()
    engine.add(40)
    assert _slices(engine.step()) == [("s1", 1), ("s2", 1), ("s3", 14)]


def test_no_step_computes_more_than_the_budget() -> None:
    engine = SimulatedEngine(num_blocks=200, max_num_seqs=12, max_num_batched_tokens=13)
    for length in (3, 50, 7, 1, 22, 9, 13, 14, 2, 31):
        engine.add(length, max_tokens=9)
    while len(engine.finished) < 10:
        schedule = engine.step()
        assert 0 < sum(n for _, n in schedule.slices) <= 13
        assert all(n >= 1 for _, n in schedule.slices)


def test_the_shortest_remaining_work_goes_first() -> None:
    engine = SimulatedEngine(max_num_batched_tokens=16)
    for length in (2, 30, 5, 12):
        engine.add(length)
    assert _slices(engine.step()) == [("s1", 2), ("s3", 5), ("s4", 9)]


def test_a_running_prefill_is_ranked_by_what_remains_of_it() -> None:
    engine = SimulatedEngine(max_num_batched_tokens=16)
    engine.add(20)
    engine.step()
    engine.add(8)
    assert _slices(engine.step()) == [("s1", 4), ("s2", 8)]


def test_the_oldest_prompt_has_its_share_of_every_step() -> None:
    engine = SimulatedEngine(num_blocks=1000, max_num_batched_tokens=16)
    long = engine.add(160, max_tokens=2)
    share = 16 // OLDEST_SHARE
    num_steps = 0
    while not long.is_decoding:
        engine.now_s += 0.01
        engine.add(16, max_tokens=1)  # enough to fill every step by itself
        assert ("s1", share) in _slices(engine.step())
        num_steps += 1
    assert num_steps == 160 // share


def test_the_oldest_prompt_gets_all_that_the_others_leave() -> None:
    engine = SimulatedEngine(max_num_batched_tokens=16)
    engine.add(40)
    engine.add(3)
    assert _slices(engine.step()) == [("s1", 13), ("s2", 3)]


def test_num_waiting_tokens_counts_prompts_that_are_to_be_computed_here() -> None:
    engine = SimulatedEngine(max_num_batched_tokens=16)
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
    engine = SimulatedEngine(max_num_seqs=2)
    for _ in range(3):
        engine.add(2, max_tokens=3)
    assert _slices(engine.step()) == [("s1", 2), ("s2", 2)]
    assert [s.spec.sequence_id for s in engine.scheduler.waiting] == ["s3"]
    engine.step()
    engine.step()
    assert len(engine.finished) == 2
    assert _slices(engine.step()) == [("s3", 2)]


def test_a_sequence_that_is_being_pulled_has_a_place() -> None:
    engine = SimulatedEngine(max_num_seqs=1)
    pulled = engine.add(5, output=(1,), is_pulled=True)
    engine.now_s = 1.0
    engine.add(2)
    assert engine.step().pulls == [pulled]
    assert _slices(engine.step()) == []


def test_a_sequence_gets_blocks_for_all_its_tokens_when_it_enters() -> None:
    engine = SimulatedEngine(num_blocks=4, max_num_batched_tokens=4)
    sequence = engine.add(13)
    engine.step()
    assert len(sequence.block_table) == 4 and sequence.num_computed == 4


def test_admission_stops_at_the_first_that_does_not_fit() -> None:
    engine = SimulatedEngine(num_blocks=8)
    engine.add(24, max_tokens=3)  # 6 blocks
    engine.step()
    engine.step()
    big = engine.add(12)  # 3 blocks
    engine.now_s = 1.0
    small = engine.add(2)
    engine.step()
    assert engine.scheduler.waiting == [big, small], "the older one must not be passed by"


def test_a_newcomer_leaves_a_block_for_each_decoding_sequence() -> None:
    engine = SimulatedEngine(num_blocks=4)
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
    engine = SimulatedEngine(num_blocks=4)
    sequence = engine.add(16, max_tokens=1)
    engine.step()
    assert engine.finished == [sequence]


def test_when_a_sequence_first_got_blocks_is_noted_once() -> None:
    engine = SimulatedEngine()
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
    engine = SimulatedEngine()
    engine.add([*range(10)], max_tokens=1)
    engine.step()
    second = engine.add([*range(10), 77, 78], max_tokens=1)
    assert _slices(engine.step()) == [("s2", 4)]
    assert second.num_cached == 8
    assert second.output_ids == expected_output(second)


def test_a_prefix_is_shared_under_one_salt_only() -> None:
    """Output blocks as well: the second turn of a chat starts with the first one's answer."""
    engine = SimulatedEngine()
    prompt = list(range(10))
    first = engine.add(prompt, cache_salt="a", max_tokens=8)
    while not engine.finished:
        engine.step()
    turn = prompt + first.output_ids
    for salt, num_cached in (("b", 0), ("", 0), ("a", 16), ("b", 16), ("", 16)):
        sequence = engine.add(turn, cache_salt=salt)
        while sequence not in engine.finished:
            engine.step()
        assert (sequence.num_cached, salt) == (num_cached, salt)


def test_the_last_token_is_always_computed() -> None:
    engine = SimulatedEngine()
    for _ in range(2):
        engine.add([*range(8)], max_tokens=1)
        engine.step()
    first, second = engine.finished
    assert (first.num_cached, second.num_cached) == (0, 4)
    assert second.output_ids == expected_output(second) == first.output_ids


def test_output_tokens_are_cached_too() -> None:
    """A conversation's next turn begins with the last answer."""
    engine = SimulatedEngine()
    first = engine.add([*range(6)], max_tokens=7)
    while first.status is not Status.ENDED:
        engine.step()
    second = engine.add([*first.token_ids, 5, 6], max_tokens=1)
    engine.step()
    assert second.num_cached == 12  # of 13; the KV of the last output token was never computed
    assert second.output_ids == expected_output(second)


def test_two_running_sequences_share_their_prefix() -> None:
    engine = SimulatedEngine()
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
    engine = SimulatedEngine(num_blocks=5)
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
    engine = SimulatedEngine(num_blocks=4)
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
    engine = SimulatedEngine(num_blocks=6, max_num_batched_tokens=4)
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
    engine = SimulatedEngine(num_blocks=4)
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
    engine = SimulatedEngine(num_blocks=3)
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
    engine = SimulatedEngine(max_num_batched_tokens=4)
    engine.add(4)
    pulled = engine.add(9, output=(3,), is_pulled=True)
    schedule = engine.step()
    assert _slices(schedule) == [("s1", 4)]
    assert schedule.pulls == [pulled]
    assert pulled.status is Status.PULLING and len(pulled.block_table) == 3


def test_a_pulled_sequence_decodes_from_its_newest_token() -> None:
    engine = SimulatedEngine()
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
    engine = SimulatedEngine()
    engine.add([*range(9)], max_tokens=1)
    engine.step()
    pulled = engine.add([*range(9)], max_tokens=3, output=(3,), is_pulled=True)
    engine.step()
    assert pulled.num_cached == pulled.num_computed == 8


def test_blocks_that_are_being_pulled_are_not_shared_yet() -> None:
    engine = SimulatedEngine()
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


@pytest.mark.parametrize("status", [Status.WAITING, Status.PULLING, Status.PREFILLING])
def test_a_sequence_may_end_in_any_status(status: Status) -> None:
    engine = SimulatedEngine(max_num_batched_tokens=4)
    sequence = engine.add(9, output=(3,), is_pulled=status is Status.PULLING)
    if status is not Status.WAITING:
        engine.step()
    assert sequence.status is status
    engine.scheduler.end(sequence)
    assert sequence.status is Status.ENDED and sequence.block_table == []
    assert not engine.scheduler.waiting and engine.scheduler.num_running == 0
    assert engine.blocks.counts().used == 0
    engine.blocks.check()


def test_a_leased_sequence_leaves_its_blocks_to_the_lease() -> None:
    engine = SimulatedEngine()
    sequence = engine.add(6, max_tokens=9)
    engine.step()
    blocks = engine.scheduler.end_leased(sequence)
    assert len(blocks) == 2 and sequence.status is Status.ENDED
    assert engine.scheduler.num_running == 0 and sequence.block_table == []
    counts = engine.blocks.counts()
    assert (counts.leased, counts.used) == (2, 0)


# ---- whole runs ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(25))
def test_every_sequence_completes_with_its_own_tokens(seed: int) -> None:
    """Random arrivals, lengths, shared prefixes, pulls that take a while, cancels, leases."""
    draw = random.Random(seed)
    engine = SimulatedEngine(
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
    while num_left or scheduler.waiting or scheduler.num_running or leases:
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
        running = [*scheduler.prefilling, *scheduler.decoding]
        schedule = engine.step()
        in_step = {s for s, _ in schedule.slices}
        assert len(in_step) == len(schedule.slices)
        assert scheduler.num_running <= 8
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
        if draw.random() < 0.05 and scheduler.decoding:
            victim = draw.choice(scheduler.decoding)
            leases.append((step + 5, scheduler.end_leased(victim)))
            done["leased"] += 1
        if draw.random() < 0.03 and scheduler.waiting:
            scheduler.end(draw.choice(scheduler.waiting))
            done["cancelled"] += 1
        engine.blocks.check()
        owed = [*scheduler.prefilling, *(s for s in scheduler.waiting if s.handle is None)]
        assert scheduler.num_waiting_tokens == sum(s.num_remaining for s in owed)
    assert len(engine.finished) + done.total() == 25
    for sequence in engine.finished:
        assert sequence.output_ids == expected_output(sequence)
        assert sequence.finish_reason(engine.max_model_len) is FinishReason.LENGTH
    counts = engine.blocks.counts()
    assert counts.free + counts.cached == engine.blocks.num_blocks


def test_the_random_runs_do_preempt() -> None:
    """Or else they would prove less than they say: tight blocks, long outputs."""
    engine = SimulatedEngine(num_blocks=10, max_num_seqs=8)
    for _ in range(8):
        engine.add(3, max_tokens=25)
    while len(engine.finished) < 8:
        engine.step()
    assert engine.scheduler.num_preemptions >= 3
    for sequence in engine.finished:
        assert sequence.output_ids == expected_output(sequence)
