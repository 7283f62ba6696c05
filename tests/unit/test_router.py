import math
from collections.abc import Sequence
from typing import Any

import pytest

from tandem.config import OrchestratorSettings
from tandem.kv.block_hash import block_hashes
from tandem.metrics import Key, MetricsBuffer
from tandem.orchestrator.backlog import Backlog
from tandem.orchestrator.path_costs import Path
from tandem.orchestrator.router import Placement, Router
from tandem.types import Load, Policy, Role, WorkerLoad

BLOCK_SIZE = 4
PREFILL, DECODE = Role.PREFILL, Role.DECODE


def worker(
    role: Role, tokens_per_s: float, name: str = "", incarnation: str = "a", **load: Any
) -> WorkerLoad:
    values = Load(role=role, num_blocks=1000, prefill_tokens_per_s=tokens_per_s, **load)
    return WorkerLoad(name or f"{role}_0_0", incarnation, values, 0.0)


class Setup:
    def __init__(self, policy: Policy = Policy.AUTO, **settings: Any) -> None:
        self.metrics = MetricsBuffer()
        values = OrchestratorSettings(policy=policy, block_size=BLOCK_SIZE, **settings)
        self.router = Router(values, self.metrics)
        self.num_placed = 0

    def place(
        self, prompt: int | list[int], workers: Sequence[WorkerLoad], now_s: float = 0.0
    ) -> Placement:
        """A prompt of its own tokens where only its length is given."""
        self.num_placed += 1
        if isinstance(prompt, int):
            prompt = [self.num_placed * 10_000 + i for i in range(prompt)]
        hashes = block_hashes(prompt, BLOCK_SIZE)
        return self.router.place(f"s{self.num_placed}", len(prompt), hashes, workers, now_s)


# ---- fixed policies ---------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [[], [worker(PREFILL, 1), worker(DECODE, 10**9)]])
@pytest.mark.parametrize("num_tokens", [1, 10_000])
def test_a_fixed_policy_looks_at_nothing(num_tokens: int, workers: list[WorkerLoad]) -> None:
    assert Setup(Policy.ALWAYS).place(num_tokens, workers).path is Path.REMOTE
    assert Setup(Policy.NEVER).place(num_tokens, workers).path is Path.LOCAL


@pytest.mark.parametrize(("num_tokens", "path"), [(99, Path.LOCAL), (100, Path.REMOTE)])
def test_policy_length_looks_at_the_length(num_tokens: int, path: Path) -> None:
    setup = Setup(Policy.LENGTH, remote_prefill_min_tokens=100)
    assert setup.place(num_tokens, []).path is path


# ---- auto: the earlier expected end -----------------------------------------------------------


@pytest.mark.parametrize(
    ("prefill", "decode", "path", "expected_s"),
    [
        # Both idle: who computes faster, hand-over included.
        ({"tokens_per_s": 1000}, {"tokens_per_s": 900}, Path.REMOTE, 0.1),
        ({"tokens_per_s": 1000}, {"tokens_per_s": 1100}, Path.LOCAL, 100 / 1100),
        (
            {"tokens_per_s": 1000},
            {"tokens_per_s": 900, "pull_tokens_per_s": 5000},
            Path.LOCAL,
            100 / 900,
        ),
        # One that is busy has its queue, and its step, first.
        (
            {"tokens_per_s": 1000, "num_waiting_tokens": 200},
            {"tokens_per_s": 400},
            Path.LOCAL,
            0.25,
        ),
        (
            {"tokens_per_s": 1000},
            {"tokens_per_s": 1500, "num_running": 0, "step_s": 0.08},
            Path.LOCAL,
            100 / 1500,
        ),
        # Four streams would lose 67 ms each: worth it only if more is lost by waiting.
        (
            {"tokens_per_s": 1000},
            {"tokens_per_s": 1500, "num_running": 4, "step_s": 0.08},
            Path.REMOTE,
            0.1 + 0.04,
        ),
        (
            {"tokens_per_s": 1000, "num_waiting_tokens": 400},
            {"tokens_per_s": 1500, "num_running": 4, "step_s": 0.08},
            Path.LOCAL,
            100 / 1500 + 0.04,
        ),
        (
            {"tokens_per_s": 2000},
            {"tokens_per_s": 900, "num_running": 4, "step_s": 0.08},
            Path.REMOTE,
            0.05 + 0.04,
        ),
        # The ITL bound leaves no time: even a long queue is no reason to break it.
        (
            {"tokens_per_s": 1000, "num_waiting_tokens": 5000},
            {"tokens_per_s": 0},
            Path.REMOTE,
            5.1,
        ),
    ],
)
def test_the_path_that_is_expected_to_end_earlier(
    prefill: dict[str, Any], decode: dict[str, Any], path: Path, expected_s: float
) -> None:
    placement = Setup().place(100, [worker(PREFILL, **prefill), worker(DECODE, **decode)])
    assert placement.path is path
    assert placement.expected_s[path] == pytest.approx(expected_s)
    assert placement.prefill == ("prefill_0_0" if path is Path.REMOTE else "decode_0_0")
    assert placement.decode == "decode_0_0"


def test_the_first_prompt_makes_the_prefill_pool_known() -> None:
    assert Setup().place(5, []).path is Path.REMOTE
    assert Setup().place(5, [worker(DECODE, 1000)]).path is Path.REMOTE


def test_a_prefill_pool_that_died_is_left_alone() -> None:
    setup = Setup()
    setup.place(5, [worker(PREFILL, 1000)])
    assert setup.place(5, [worker(DECODE, 1)]).path is Path.LOCAL
    assert setup.place(5, []).path is Path.LOCAL


def test_what_was_given_counts_before_it_is_reported() -> None:
    """A burst between two reports spreads over both pools."""
    setup = Setup()
    workers = [worker(PREFILL, 1000), worker(DECODE, 500)]
    paths = [setup.place(1000, workers).path for _ in range(9)]
    assert paths.count(Path.REMOTE) == 6


def test_what_was_given_is_computed_in_time() -> None:
    setup = Setup()
    workers = [worker(PREFILL, 1000), worker(DECODE, 100)]
    setup.place(5000, workers)
    assert setup.place(5000, workers, now_s=1.0).expected_s[Path.REMOTE] == pytest.approx(9.0)


def test_what_ended_is_computed() -> None:
    setup = Setup()
    workers = [worker(PREFILL, 1000), worker(DECODE, 100)]
    for end in [
        lambda placement: setup.router.prefilled(placement, "prefill_0_0", 1.0),
        lambda placement: setup.router.ended(placement),
    ]:
        end(setup.place(5000, workers))
        placement = setup.place(1000, workers)
        assert placement.expected_s[Path.REMOTE] == pytest.approx(1.0)
        setup.router.ended(placement)


def test_a_report_grows_old() -> None:
    setup = Setup()
    workers = [worker(PREFILL, 1000, num_waiting_tokens=500), worker(DECODE, 10)]
    placement = setup.place(100, workers, now_s=0.4)
    assert placement.expected_s[Path.REMOTE] == pytest.approx(0.2)


# ---- prefixes ---------------------------------------------------------------------------------


def test_a_cached_prefix_costs_nothing() -> None:
    setup = Setup()
    workers = [worker(PREFILL, 1000), worker(DECODE, 500)]
    prompt = list(range(400))
    setup.router.prefilled(setup.place(prompt, workers), "decode_0_0", 0.0)
    again = setup.place([*prompt, 1, 2, 3, 4], workers)
    assert again.path is Path.LOCAL
    assert again.expected_s[Path.LOCAL] == pytest.approx(4 / 500)
    assert setup.place(prompt, workers).expected_s[Path.LOCAL] == pytest.approx((4 + 4) / 500), (
        "the last token is always computed"
    )


def test_decode_pulls_what_it_lacks() -> None:
    setup = Setup(Policy.ALWAYS)
    workers = [worker(PREFILL, 1000), worker(DECODE, 500, pull_tokens_per_s=100)]
    prompt = list(range(400))
    placement = setup.place(prompt, workers)
    assert placement.expected_s[Path.REMOTE] == pytest.approx(0.4 + 4.0)
    setup.router.prefilled(placement, "prefill_0_0", 0.0)
    setup.router.pulled(placement, "decode_0_0", placement.expected_s[Path.REMOTE])
    again = setup.place([*prompt, 1, 2, 3, 4], workers)
    assert again.expected_s[Path.REMOTE] == pytest.approx(4 / 1000 + 4 / 100)


def test_a_new_incarnation_has_an_empty_cache() -> None:
    setup = Setup(Policy.ALWAYS)
    prompt = list(range(400))
    setup.router.prefilled(setup.place(prompt, [worker(PREFILL, 1000)]), "prefill_0_0", 0.0)
    placement = setup.place(prompt, [worker(PREFILL, 1000, incarnation="b")])
    assert placement.expected_s[Path.REMOTE] == pytest.approx(0.4)


def test_a_prompt_goes_where_its_prefix_is_unless_too_much_waits_there() -> None:
    setup = Setup(Policy.ALWAYS)
    names = ["p0", "p1", "p2"]
    idle = [worker(PREFILL, 1000, name) for name in names]
    prompt = list(range(400))
    setup.router.prefilled(setup.place(prompt, idle), "p1", 0.0)
    chosen = [setup.place([*prompt, i, i, i, i], idle).prefill for i in range(220)]
    assert set(chosen[:195]) == {"p1"}
    assert {"p0", "p2"} <= set(chosen), (
        "200 · 4 tokens take as long as computing the prefix again, for which others would wait"
    )


# ---- what it learns ---------------------------------------------------------------------------


def test_the_overhead_of_a_path_is_learnt() -> None:
    setup = Setup()
    workers = [worker(PREFILL, 1000), worker(DECODE, 900)]
    num_remote = 0
    while (placement := setup.place(100, workers)).path is Path.REMOTE:
        num_remote += 1
        assert num_remote < 20
        setup.router.prefilled(placement, "prefill_0_0", 0.15)
        setup.router.pulled(placement, "decode_0_0", 0.15)  # 0.1 s were expected
    assert num_remote >= 2
    for _ in range(200):
        if placement.path is Path.REMOTE:
            break
        setup.router.prefilled(placement, "decode_0_0", 100 / 900)
        placement = setup.place(100, workers)
    assert placement.path is Path.REMOTE, "it is tried again"


def test_one_stuck_request_is_not_an_overhead() -> None:
    setup = Setup()
    workers = [worker(PREFILL, 1000), worker(DECODE, 500)]
    placement = setup.place(100, workers)
    setup.router.prefilled(placement, "prefill_0_0", 60.0)
    setup.router.pulled(placement, "decode_0_0", 60.0)
    assert setup.place(100, workers).path is Path.REMOTE


def test_errors_and_regret_are_counted() -> None:
    setup = Setup()
    workers = [worker(PREFILL, 1000), worker(DECODE, 500)]
    placement = setup.place(100, workers, now_s=10.0)
    setup.router.prefilled(placement, "prefill_0_0", 10.1)
    setup.router.pulled(placement, "decode_0_0", 10.5)
    placement = setup.place(100, workers, now_s=10.5)
    setup.router.prefilled(placement, "prefill_0_0", 10.6)
    setup.router.pulled(placement, "decode_0_0", 10.6)
    counters, _, observations = setup.metrics.drain()
    regret_s = counters[Key("tandem_route_regret_seconds_total", "remote")]
    assert regret_s == pytest.approx(0.5 - 0.2), "the other path was expected to take 0.2 s"
    key = Key("tandem_route_error_seconds", "remote")
    assert [k for k, _ in observations] == [key, key]
    assert observations[0][1] == pytest.approx(0.4)


def test_without_workers_nothing_is_expected_and_nothing_counted() -> None:
    setup = Setup()
    placement = setup.place(100, [])
    assert placement.expected_s == {Path.REMOTE: math.inf, Path.LOCAL: math.inf}
    setup.router.prefilled(placement, "prefill_0_0", 1.0)
    setup.router.pulled(placement, "decode_0_0", 1.0)
    setup.router.ended(placement)
    assert setup.metrics.drain() == ({}, {}, [])


# ---- backlog ----------------------------------------------------------------------------------


def test_short_prompts_are_ahead_of_long_ones() -> None:
    backlog = Backlog()
    backlog.add("long", 1000)
    backlog.add("short", 50)
    assert [backlog.ahead_of(n, 0.0) for n in (10, 50, 999, 1000)] == [0, 50, 50, 1050]


def test_what_a_worker_reports_beyond_is_from_others() -> None:
    backlog = Backlog()
    backlog.add("a", 1000)
    assert backlog.ahead_of(10, 1300.0) == 300
    assert backlog.ahead_of(10, 700.0) == 0


def test_it_drains_shortest_first() -> None:
    backlog = Backlog()
    backlog.drain(5.0, 100.0)
    backlog.add("long", 1000)
    backlog.add("short", 50)
    backlog.drain(7.0, 100.0)
    assert backlog.num_tokens == 850
    assert backlog.ahead_of(849, 0.0) == 0
    backlog.remove("long")
    backlog.remove("never given")
    assert backlog.num_tokens == 0
