"""Runs the trials of a rate search: one short open-loop run a rate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
from rich.console import Console

from tandem_perf.arrivals import PoissonArrivals
from tandem_perf.rate_search import RateSearch, Trial
from tandem_perf.run import run_load
from tandem_perf.run_config import RunConfig
from tandem_perf.summary import Summary, write_json

SEARCH = "rate_search.json"
MIN_REQUESTS = 20  # of a trial, so that attainment has a resolution of 5 %


class RateSearchResult(msgspec.Struct, frozen=True, kw_only=True):
    """``best_rate``: None if no rate passed. ``trials``: rate, attainment, in order of running;
    the one at rate r is in the folder ``rate-r``.
    """

    best_rate: float | None
    min_attainment: float
    trial_s: float
    interrupted: bool
    trials: tuple[Trial, ...]


def find_rate(
    config: RunConfig, search: RateSearch, min_attainment: float, trial_s: float, console: Console
) -> Summary | None:
    """Runs until the search is over; returns the summary of the best trial, None if none passed.

    A trial is ``trial_s`` long, or longer to send 20 requests. Each has prompts of its own, so
    that none finds those of an earlier one in a prefix cache.
    """
    summaries: dict[float, Summary] = {}
    interrupted = False
    while not interrupted and (rate := search.next_rate()) is not None:
        number = len(search.trials)
        trial = replace(
            config,
            arrivals=PoissonArrivals(rate),
            num_requests=max(MIN_REQUESTS, round(rate * trial_s)),
            duration_s=None,
            seed=config.seed + number,
            warm_up=config.warm_up if number == 0 else 0,
            out_dir=trial_folder(config.out_dir, rate),
        )
        summary = run_load(trial, console)
        summaries[rate] = summary
        interrupted = summary.interrupted
        if not interrupted:
            attainment = summary.statistics.overall.attainment or 0.0
            search.add(Trial(rate, attainment))
            console.print(f"{rate:.2f} requests/s: {attainment:.1%} in SLO", highlight=False)
    result = RateSearchResult(
        best_rate=search.best,
        min_attainment=min_attainment,
        trial_s=trial_s,
        interrupted=interrupted,
        trials=tuple(search.trials),
    )
    write_json(config.out_dir / SEARCH, result)
    return None if search.best is None else summaries[search.best]


def trial_folder(out_dir: Path, rate: float) -> Path:
    return out_dir / f"rate-{rate:.3f}"
