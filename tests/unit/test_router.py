import pytest

from tandem.config import OrchestratorSettings
from tandem.orchestrator.router import Path, choose_path
from tandem.types import Load, Policy, Role

SETTINGS = OrchestratorSettings(remote_prefill_min_tokens=100, remote_prefill_max_queue_tokens=1000)


def _load(role: Role, num_waiting_tokens: int) -> Load:
    return Load(role=role, num_waiting_tokens=num_waiting_tokens)


def _prefill(*waiting: int) -> list[Load]:
    return [_load(Role.PREFILL, tokens) for tokens in waiting]


def _decode(*waiting: int) -> list[Load]:
    return [_load(Role.DECODE, tokens) for tokens in waiting]


@pytest.mark.parametrize(("policy", "path"), [("always", Path.REMOTE), ("never", Path.LOCAL)])
@pytest.mark.parametrize("num_tokens", [0, 1, 10_000])
def test_a_fixed_policy_looks_at_nothing(policy: str, path: Path, num_tokens: int) -> None:
    settings = OrchestratorSettings(policy=Policy(policy))
    assert choose_path(settings, num_tokens, _prefill(10**6)) is path
    assert choose_path(settings, num_tokens, []) is path


@pytest.mark.parametrize(
    ("num_uncached", "path"),
    [(0, Path.LOCAL), (99, Path.LOCAL), (100, Path.REMOTE), (5000, Path.REMOTE)],
)
def test_auto_keeps_short_prompts_local(num_uncached: int, path: Path) -> None:
    assert choose_path(SETTINGS, num_uncached, []) is path


@pytest.mark.parametrize(
    ("loads", "path"),
    [
        (_prefill(1000) + _decode(0), Path.REMOTE),
        (_prefill(1001) + _decode(0), Path.LOCAL),
        (_prefill(5000) + _decode(4000), Path.REMOTE),
        (_prefill(5001) + _decode(4000), Path.LOCAL),
        (_prefill(0) + _decode(9000), Path.REMOTE),
        (_prefill(2000, 0) + _decode(0), Path.REMOTE),
        (_prefill(2000, 2) + _decode(0), Path.LOCAL),
        (_prefill(1500) + _decode(1000, 0), Path.REMOTE),
        (_prefill(1501) + _decode(1000, 0), Path.LOCAL),
        (_prefill(1001), Path.LOCAL),
        (_decode(5000), Path.REMOTE),
    ],
)
def test_auto_keeps_long_prompts_local_where_more_waits_per_prefill_worker(
    loads: list[Load], path: Path
) -> None:
    assert choose_path(SETTINGS, 500, loads) is path


def test_loads_may_be_any_iterable() -> None:
    assert choose_path(SETTINGS, 500, iter(_prefill(5000) + _decode(0))) is Path.LOCAL
