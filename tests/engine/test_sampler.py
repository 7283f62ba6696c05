"""The sampler against values computed by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.sampler import Sampled, SampleRequest, sample, uniform
from tandem.errors import EngineFault
from tandem.types import SamplingParams

torch.set_num_threads(1)


def request(prompt_ids=(0,), output_ids=(), **params) -> SampleRequest:
    return SampleRequest(SamplingParams(max_tokens=100, **params), prompt_ids, output_ids)


def choose(logits: list[float], prompt_ids=(0,), output_ids=(), **params) -> int:
    return sample(torch.tensor([logits]), [request(prompt_ids, output_ids, **params)])[0].token_id


def support(logits: list[float], num_draws: int = 400, **params) -> set[int]:
    """Every token that comes out over many seeds."""
    requests = [request(seed=seed, **params) for seed in range(num_draws)]
    return {s.token_id for s in sample(torch.tensor([logits] * num_draws), requests)}


def log_probs(probs: list[float]) -> list[float]:
    return [math.log(p) for p in probs]


def test_temperature_0_is_the_argmax():
    assert choose([0.1, 3.0, 2.9, -1.0]) == 1


@pytest.mark.parametrize(
    ("logits", "prompt_ids", "output_ids", "penalty", "expected"),
    [
        ([3.0, 2.0, 0.0], (0,), (), 1.4, 0),  # 3 / 1.4 = 2.14 > 2
        ([3.0, 2.0, 0.0], (0,), (), 1.6, 1),  # 3 / 1.6 = 1.88 < 2
        ([3.0, 2.0, 0.0], (2,), (0,), 1.6, 1),  # the output counts as well
        ([3.0, 2.0, 0.0], (0, 0, 0), (0, 0), 1.4, 0),  # once, however often it was seen
        ([-1.0, -1.5, -9.0], (0,), (), 1.4, 0),  # -1 * 1.4 = -1.4 > -1.5
        ([-1.0, -1.5, -9.0], (0,), (), 1.6, 1),  # -1 * 1.6 = -1.6 < -1.5
    ],
)
def test_repetition_penalty(logits, prompt_ids, output_ids, penalty, expected):
    assert choose(logits, prompt_ids, output_ids, repetition_penalty=penalty) == expected


@pytest.mark.parametrize(
    ("output_ids", "presence", "frequency", "expected"),
    [
        ((), 5.0, 5.0, 0),  # the prompt does not count
        ((0,), 0.9, 0.0, 0),  # 3 - 0.9 > 2
        ((0, 0), 0.9, 0.0, 0),  # presence: once
        ((0,), 1.1, 0.0, 1),
        ((0,), 0.0, 0.6, 0),
        ((0, 0), 0.0, 0.6, 1),  # 3 - 2 * 0.6 < 2
        ((0, 0), 0.5, 0.3, 1),  # 3 - 0.5 - 0.6 < 2
        ((0, 0), 0.3, 0.3, 0),  # 3 - 0.3 - 0.6 > 2
    ],
)
def test_presence_and_frequency_penalties(output_ids, presence, frequency, expected):
    token = choose(
        [3.0, 2.0, 0.0],
        (0, 0, 0),
        output_ids,
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    assert token == expected


def test_penalties_of_one_row_leave_the_others_alone():
    logits = torch.tensor([[3.0, 2.0, 0.0]] * 3)
    requests = [
        request((0,), repetition_penalty=2.0),
        request((0,)),
        request((1,), (0,), presence_penalty=2.0),
    ]
    assert [s.token_id for s in sample(logits, requests)] == [1, 0, 1]
    assert torch.equal(logits, torch.tensor([[3.0, 2.0, 0.0]] * 3))


@pytest.mark.parametrize(("output_ids", "expected"), [((), 1), ((1,), 1), ((1, 1), 0)])
def test_min_tokens_suppresses_stop_tokens(output_ids, expected):
    token = choose([9.0, 2.0, 5.0], (0,), output_ids, min_tokens=2, stop_token_ids=(0, 2, 10_000))
    assert token == expected


def test_top_k_keeps_the_k_best():
    logits = [1.0, 4.0, 3.0, 2.0]
    assert support(logits, temperature=5.0, top_k=2) == {1, 2}
    assert support(logits, temperature=5.0, top_k=1) == {1}
    assert support(logits, temperature=5.0, top_k=99) == {0, 1, 2, 3}


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    logits = log_probs([0.1, 0.5, 0.25, 0.15])
    assert support(logits, temperature=1.0, top_p=0.45) == {1}
    assert support(logits, temperature=1.0, top_p=0.7) == {1, 2}
    assert support(logits, temperature=1.0, top_p=0.8) == {1, 2, 3}
    assert support(logits, temperature=1.0, top_p=0.01) == {1}
    # Of the two that top_k leaves, the first has 2/3 of the weight.
    assert support(logits, temperature=1.0, top_k=2, top_p=0.6) == {1}


def test_min_p_keeps_what_is_near_the_best():
    logits = log_probs([0.1, 0.5, 0.26, 0.14])
    assert support(logits, temperature=1.0, min_p=0.5) == {1, 2}
    assert support(logits, temperature=1.0, min_p=0.25) == {1, 2, 3}
    assert support(logits, temperature=1.0, min_p=1.0) == {1}


def test_equal_scores_at_the_edge_of_a_filter_all_stay():
    assert support([3.0, 1.0, 2.0, 2.0], temperature=3.0, top_k=2) == {0, 2, 3}
    logits = log_probs([0.5, 0.1, 0.2, 0.2])
    assert support(logits, temperature=1.0, top_p=0.6) == {0, 2, 3}


def test_top_p_over_a_nearly_flat_vocabulary():
    """The set is wider than the first guess of the search, and than the second."""
    logits = -torch.arange(20_000) / 50_000
    cdf = torch.softmax(logits.double(), -1).cumsum(-1)
    num_kept = int((cdf < 0.7).sum()) + 1
    requests = [request(temperature=1.0, top_p=0.7, seed=seed) for seed in range(300)]
    tokens = [s.token_id for s in sample(logits.expand(300, -1), requests)]
    assert 0.95 * num_kept < max(tokens) < num_kept


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0.1, 0.5, 0.25, 0.15]),
        ({"temperature": 0.5}, [0.01 / 0.345, 0.25 / 0.345, 0.0625 / 0.345, 0.0225 / 0.345]),
        ({"top_p": 0.7}, [0, 0.5 / 0.75, 0.25 / 0.75, 0]),
        ({"top_k": 3}, [0, 0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9]),
        ({"min_p": 0.4}, [0, 0.5 / 0.75, 0.25 / 0.75, 0]),
    ],
)
def test_distribution(params, expected):
    """Chi-square over 4,000 positions of one seed; 16.3 is the 0.1 % point of 3 degrees."""
    num_draws = 4000
    logits = torch.tensor([log_probs([0.1, 0.5, 0.25, 0.15])] * num_draws)
    requests = [
        request(range(position), seed=11, **({"temperature": 1.0} | params))
        for position in range(1, num_draws + 1)
    ]
    counts = torch.bincount(
        torch.tensor([s.token_id for s in sample(logits, requests)]), minlength=4
    ).tolist()
    assert all(count == 0 for count, p in zip(counts, expected, strict=True) if p == 0)
    weighted = [(c, p * num_draws) for c, p in zip(counts, expected, strict=True) if p]
    assert sum((c - mean) ** 2 / mean for c, mean in weighted) < 16.3


def test_the_uniform_number_is_pinned():
    """A change here changes every seeded output, also between versions of one deployment."""
    assert uniform(0, 0) != uniform(0, 1) != uniform(1, 1)
    assert uniform(-1, 5) == uniform(2**64 - 1, 5)
    assert uniform(42, 7) == pytest.approx(0.4074136540795371, abs=1e-15)


def test_seeded_sampling_is_the_same_alone_and_in_a_batch():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(24, 1000, generator=generator) * 2
    kinds = [
        {"temperature": 0.8},
        {"temperature": 1.1, "top_p": 0.9},
        {"temperature": 0.7, "top_k": 40, "top_p": 0.95},
        {"temperature": 1.0, "top_k": 5, "min_p": 0.1},
        {},
        {"temperature": 1.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    ]
    requests = [
        request(range(row + 1), range(row), seed=row, logprobs=row % 3 == 0, **kinds[row % 6])
        for row in range(24)
    ]
    together = sample(logits, requests)
    alone = [sample(logits[i : i + 1], [r])[0] for i, r in enumerate(requests)]
    assert [s.token_id for s in together] == [s.token_id for s in alone]
    assert [s.logprob for s in together] == pytest.approx([s.logprob for s in alone])
    order = list(reversed(range(24)))
    backwards = sample(logits[order], [requests[i] for i in order])
    assert [s.token_id for s in backwards] == [together[i].token_id for i in order]


def test_position_counts_prompt_and_output():
    """A resumed sequence (prompt + tokens already sent) goes on with the same numbers."""
    logits = torch.zeros(1, 1000)
    split = request((1, 2, 3), (4, 5), temperature=1.0, seed=9)
    joined = request((1, 2, 3, 4, 5), (), temperature=1.0, seed=9)
    assert split.position == joined.position == 5
    assert sample(logits, [split]) == sample(logits, [joined])


def test_logprob_is_of_the_raw_logits():
    logits = [0.0, 2.0, 1.0]
    total = math.log(1 + math.exp(2) + math.exp(1))
    plain, penalised, silent = sample(
        torch.tensor([logits] * 3),
        [
            request(logprobs=True),
            request((1,), repetition_penalty=4.0, logprobs=True),
            request(),
        ],
    )
    assert plain.token_id == 1
    assert plain.logprob == pytest.approx(2.0 - total)
    assert penalised.token_id == 2
    assert penalised.logprob == pytest.approx(1.0 - total)
    assert silent == Sampled(1, None)


def test_no_requests_no_tokens():
    assert sample(torch.empty(0, 10), []) == []


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_a_fault(bad, temperature):
    logits = torch.zeros(2, 4)
    logits[1, 2] = bad
    with pytest.raises(EngineFault, match="not finite"):
        sample(logits, [request(), request(temperature=temperature)])


def _above(limit: float, most: float) -> st.SearchStrategy[float]:
    smallest = [5e-324, 1e-320, 1e-45, 1e-38, 1e-7]
    return st.sampled_from(smallest) | st.floats(limit, most, exclude_min=True)


@given(
    logits=st.lists(st.floats(-1e4, 1e4, width=32), min_size=2, max_size=6),
    temperature=st.just(0.0) | _above(0, 100),
    top_p=_above(0, 1),
    min_p=st.floats(0, 1),
    repetition_penalty=_above(0, 100),
    presence_penalty=st.floats(-2, 2),
    stop_token_ids=st.lists(st.integers(-3, 2**64 - 1), max_size=3).map(tuple),
    min_tokens=st.integers(0, 3),
    top_k=st.integers(0, 2**40),
    seed=st.integers(-(2**63), 2**63 - 1),
)
def test_any_allowed_parameters_give_a_token_of_the_vocabulary(logits, **params):
    """One beyond it would end the engine at its next step."""
    assert 0 <= choose(logits, (0, 1), (1,), **params) < len(logits)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_there_is_a_token_where_every_one_is_a_stop_token(temperature):
    stops = {"stop_token_ids": (0, 1, 2, -7, 10**6), "min_tokens": 1}
    assert choose([0.1, 3.0, 2.9], temperature=temperature, **stops) in (0, 1, 2)


def test_the_smallest_temperature_is_greedy():
    for temperature in (1e-320, 1e-45, 1e-9):
        assert choose([0.1, 3.0, 2.9, -1.0], temperature=temperature, seed=3) == 1
