"""The rate search against synthetic servers whose capacity is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tandem_perf.rate_search import RateSearch, Trial


def search(model: Callable[[float], float], start: float, **options: float) -> RateSearch:
    result = RateSearch(start, **options)
    while (rate := result.next_rate()) is not None:
        assert len(result.trials) < 40, "it does not end"
        result.add(Trial(rate, model(rate)))
    return result


def capacity(limit: float) -> Callable[[float], float]:
    """All meet the SLO up to ``limit``; beyond, only as many as it can serve."""
    return lambda rate: min(1.0, limit / rate) if rate > limit else 1.0


@pytest.mark.parametrize("start", [0.1, 1.0, 3.3, 50.0])
def test_finds_the_highest_rate_from_anywhere(start: float) -> None:
    result = search(capacity(3.6), start, tolerance=0.05)
    highest = 3.6 / 0.9  # 90 % attainment
    assert result.best is not None
    assert highest / 1.05 <= result.best <= highest


def test_needs_few_trials() -> None:
    assert len(search(capacity(5.0), 2.0).trials) <= 7


def test_a_target_that_always_fails_ends_at_the_lowest_rate() -> None:
    result = search(lambda rate: 0.0, 1.0, min_rate=0.25)
    assert result.best is None
    assert [trial.rate for trial in result.trials] == [1.0, 0.5, 0.25]


def test_a_target_that_always_passes_ends_at_the_highest_rate() -> None:
    result = search(lambda rate: 1.0, 1.0, max_rate=5.0)
    assert result.best == 5.0


def test_a_pass_above_a_failure_is_noise() -> None:
    result = RateSearch(1.0)
    for trial in (Trial(1.0, 1.0), Trial(2.0, 0.5), Trial(4.0, 1.0)):
        result.add(trial)
    assert result.best == 1.0


def test_attainment_at_the_limit_passes() -> None:
    result = RateSearch(1.0, min_attainment=0.95)
    result.add(Trial(1.0, 0.95))
    assert result.best == 1.0
