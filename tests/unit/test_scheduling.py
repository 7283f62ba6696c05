"""What the scheduler promises over many steps, in simulated time."""

from __future__ import annotations

import math
import random

import pytest

from simulated_engine import BLOCK_SIZE, SimulatedEngine, expected_output
from tandem.engine.sequence import Sequence, Status


def _step_cost(num_decoding: int, num_prefill_tokens: int) -> float:
    """Seconds, as on a slow CPU."""
    return 0.02 + 0.002 * num_decoding + 0.002 * num_prefill_tokens


def _run(engine: SimulatedEngine, arrivals: list[tuple[float, int]]) -> list[Sequence]:
    """Prompts of these lengths come at these times; until all have ended."""
    pending = sorted(arrivals)
    sequences: list[Sequence] = []
    while len(engine.finished) < len(arrivals):
        while pending and pending[0][0] <= engine.now_s:
            arrived_s, length = pending.pop(0)
            sequences.append(engine.add(length, max_tokens=2))
            sequences[-1].arrived_s = arrived_s
        if not engine.step().slices:
            assert pending, "nothing moves any more"
            engine.now_s = pending[0][0]
    return sequences


# ---- one long prompt among short ones ---------------------------------------------------------

AT_ONCE = [0.001] * 20
IN_TURN = [0.001 + 0.1 * i for i in range(20)]  # a little faster than they are computed


@pytest.mark.parametrize("short_s", [AT_ONCE, IN_TURN], ids=["at once", "in turn"])
@pytest.mark.parametrize("chunk", [32, 64])
def test_one_long_prompt_hardly_delays_short_ones(short_s: list[float], chunk: int) -> None:
    """Of twenty, the 99th percentile is the worst."""
    shorts = [(arrived_s, 64) for arrived_s in short_s]
    worst = {}
    for name, others in {"without": [], "with": [(0.0, 4096)]}.items():
        engine = SimulatedEngine(
            num_blocks=4000, max_num_seqs=64, max_num_batched_tokens=chunk, step_cost=_step_cost
        )
        sequences = _run(engine, [*others, *shorts])
        waits = [engine.first_token_s[s] - s.arrived_s for s in sequences]
        worst[name] = max(waits[len(others) :])
        if others:
            assert sequences[0].output_ids == expected_output(sequences[0])
            total_s = engine.first_token_s[sequences[0]]
            assert total_s < 1.5 * (4096 / chunk) * _step_cost(2, chunk)
    assert worst["with"] <= 2 * worst["without"]


# ---- inter-token latency ------------------------------------------------------------------------


@pytest.mark.parametrize("max_itl_s", [0.1, 0.2])
def test_a_local_prefill_keeps_the_bound_of_those_that_decode(max_itl_s: float) -> None:
    engine = SimulatedEngine(
        num_blocks=4000, max_num_batched_tokens=128, max_itl_s=max_itl_s, step_cost=_step_cost
    )
    for _ in range(4):
        engine.add(100, max_tokens=500)
    while len(engine.scheduler.decoding) < 4:
        engine.step()
    for _ in range(30):
        engine.step()
    long = engine.add(2000)
    gaps, chunks = [], []
    while not long.is_decoding:
        before_s = engine.now_s
        chunks.append(engine.step().num_prefill_tokens)
        gaps.append(engine.now_s - before_s)
    fitting = (max_itl_s - _step_cost(4, 0)) / 0.002
    assert sum(gap > 1.1 * max_itl_s for gap in gaps) <= 5, "while it learns"
    assert chunks[-2] == pytest.approx(fitting, rel=0.15), "and no smaller than it has to be"


def test_nobody_decodes_and_nothing_is_bounded() -> None:
    engine = SimulatedEngine(
        num_blocks=4000, max_num_batched_tokens=128, max_itl_s=0.05, step_cost=_step_cost
    )
    engine.add(1000)
    assert [engine.step().num_prefill_tokens for _ in range(3)] == [128] * 3


def test_a_pull_counts_as_decoding() -> None:
    """It may decode right after this step."""
    engine = SimulatedEngine(
        num_blocks=4000, max_num_batched_tokens=128, max_itl_s=0.1, step_cost=_step_cost
    )
    engine.add(1000)
    engine.step()
    engine.add(9, output=(3,), is_pulled=True)
    engine.step()
    assert engine.step().num_prefill_tokens < 100


def test_a_bound_that_cannot_be_kept_leaves_a_block_a_step() -> None:
    engine = SimulatedEngine(
        num_blocks=4000, max_num_batched_tokens=128, max_itl_s=0.01, step_cost=_step_cost
    )
    engine.add(4, max_tokens=200)
    for _ in range(20):
        engine.step()
    assert engine.scheduler.prefill_tokens_per_s == 0, "the router shall send no prompt here"
    engine.add(100)
    assert engine.step().num_prefill_tokens == BLOCK_SIZE


def test_the_prefill_rate_is_what_it_turns_out_to_be() -> None:
    engine = SimulatedEngine(
        num_blocks=4000, max_num_batched_tokens=128, max_itl_s=0.2, step_cost=_step_cost
    )
    engine.add(100, max_tokens=500)
    for length in (1000, 50, 1000):
        sequence = engine.add(length, max_tokens=1)
        while sequence.status is not Status.ENDED:
            engine.step()
    predicted, started_s = engine.scheduler.prefill_tokens_per_s, engine.now_s
    sequence = engine.add(1000, max_tokens=1)
    while sequence.status is not Status.ENDED:
        engine.step()
    assert 1000 / (engine.now_s - started_s) == pytest.approx(predicted, rel=0.15)


# ---- preemption -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_preemption_neither_starves_nor_thrashes(seed: int) -> None:
    """Outputs that outgrow few blocks all the time: all end, each is pushed out a few times at
    most, and not much is computed twice.
    """
    draw = random.Random(seed)
    num_blocks = draw.randint(12, 40)
    engine = SimulatedEngine(num_blocks=num_blocks, max_num_seqs=32, max_num_batched_tokens=48)
    half = num_blocks * BLOCK_SIZE // 2
    sequences: list[Sequence] = []
    num_computed = num_steps = 0
    while len(engine.finished) < 60:
        if len(sequences) < 60 and draw.random() < 0.5:
            sequences.append(engine.add(draw.randint(1, half), max_tokens=draw.randint(1, half)))
        num_computed += sum(n for _, n in engine.step().slices)
        num_steps += 1
        assert num_steps < 2000, "nothing moves any more"
    for sequence in sequences:
        assert sequence.output_ids == expected_output(sequence)
        assert sequence.num_preemptions <= math.log2(num_blocks)
    assert engine.scheduler.num_preemptions <= len(sequences)
    assert num_computed <= 1.5 * sum(len(s.token_ids) - 1 for s in sequences)
