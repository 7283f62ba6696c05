import random

import pytest

from tandem.engine.step_cost import StepCost

FAST, SLOW = (0.002, 0.0001, 0.00002), (0.05, 0.008, 0.005)  # a step, a decode, a prefill token


def _seconds(costs: tuple[float, ...], num_decoding: int, num_prefill_tokens: int) -> float:
    return costs[0] + costs[1] * num_decoding + costs[2] * num_prefill_tokens


def _learn(cost: StepCost, costs: tuple[float, ...], num_steps: int, seed: int = 1) -> None:
    draw = random.Random(seed)
    for _ in range(num_steps):
        sizes = draw.randint(1, 12), draw.choice([0, 0, 16, 64, 128])
        cost.observe(*sizes, _seconds(costs, *sizes) * draw.uniform(0.9, 1.1))


@pytest.mark.parametrize("costs", [FAST, SLOW])
def test_it_learns_what_steps_take(costs: tuple[float, ...]) -> None:
    cost = StepCost()
    _learn(cost, costs, 200)
    for sizes in [(4, 0), (8, 32), (8, 128), (12, 64)]:
        assert cost.seconds(*sizes) == pytest.approx(_seconds(costs, *sizes), rel=0.15)


def test_one_step_gives_the_order_of_magnitude() -> None:
    cost = StepCost()
    cost.observe(4, 100, 0.5)
    assert cost.seconds(4, 100) == pytest.approx(0.5)
    assert 0.1 < cost.seconds(4, 60) < 0.5


def test_it_follows_a_change() -> None:
    cost = StepCost()
    _learn(cost, SLOW, 200)
    _learn(cost, FAST, 400, seed=2)
    assert cost.seconds(8, 128) == pytest.approx(_seconds(FAST, 8, 128), rel=0.2)


def test_an_outlier_is_hardly_believed() -> None:
    cost = StepCost()
    _learn(cost, SLOW, 100)
    before = cost.seconds(8, 64)
    cost.observe(8, 64, 100 * before)
    assert cost.seconds(8, 64) < 1.5 * before


def test_a_kind_of_step_that_does_not_occur_keeps_its_estimate() -> None:
    cost = StepCost()
    _learn(cost, SLOW, 200)
    for _ in range(1000):
        cost.observe(4, 0, _seconds(SLOW, 4, 0))
    assert cost.seconds(4, 0) == pytest.approx(_seconds(SLOW, 4, 0), rel=0.01)
    assert cost.seconds(4, 100) == pytest.approx(_seconds(SLOW, 4, 100), rel=0.15)


def test_the_tokens_that_fit_are_those_that_take_as_long() -> None:
    cost = StepCost()
    _learn(cost, SLOW, 200)
    fitting = cost.prefill_tokens_within(4, 0.5)
    assert cost.seconds(4, fitting) == pytest.approx(0.5, abs=0.006)
    assert cost.prefill_tokens_within(12, 0.05) < 0
