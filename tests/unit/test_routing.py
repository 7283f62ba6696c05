"""What routing achieves over many requests, in simulated time."""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest

from simulated_engine import SimulatedEngine
from tandem.config import OrchestratorSettings
from tandem.engine.sequence import Sequence
from tandem.kv.block_hash import block_hashes
from tandem.metrics import MetricsBuffer
from tandem.orchestrator.path_costs import Path
from tandem.orchestrator.router import Placement, Router
from tandem.types import Load, Policy, Role, WorkerLoad

BLOCK_SIZE = 16

# ---- two pools of one engine each, with their own schedulers -------------------------------------


def _step_cost(num_decoding: int, num_prefill_tokens: int) -> float:
    return 0.02 + 0.002 * num_decoding + 0.002 * num_prefill_tokens


@dataclass(eq=False)
class _Request:
    arrived_s: float
    num_tokens: int
    placement: Placement | None = None
    first_token_s: float = 0.0
    ended_s: float = 0.0


class _TwoEngines:
    """One prefill and one decode engine; the real router and schedulers, simulated computing."""

    def __init__(self, policy: Policy, max_itl_s: float = 0.1) -> None:
        settings = OrchestratorSettings(policy=policy, block_size=BLOCK_SIZE)
        self.router = Router(settings, MetricsBuffer())
        self.engines = {
            role: SimulatedEngine(
                num_blocks=4000,
                max_num_seqs=64,
                max_num_batched_tokens=128,
                max_itl_s=max_itl_s,
                step_cost=_step_cost,
                checks_blocks=False,
            )
            for role in Role
        }
        self.owners: dict[Sequence, _Request] = {}
        self.pull_s = 0.005
        self.gaps_s: list[float] = []  # of steps in which something decoded
        self.asleep: set[Role] = set()

    def run(self, requests: list[_Request]) -> None:
        events: list[tuple[float, int, Callable[[float], None]]] = []
        numbers = itertools.count()

        def at(when_s: float, what: Callable[[float], None]) -> None:
            heapq.heappush(events, (when_s, next(numbers), what))

        def arrive(request: _Request, now_s: float) -> None:
            hashes = [f"{id(request)}.{i}".encode() for i in range(request.num_tokens // 16)]
            placement = self.router.place(
                str(id(request)), request.num_tokens, hashes, self._loads(now_s), now_s
            )
            request.placement = placement
            role = Role.PREFILL if placement.path is Path.REMOTE else Role.DECODE
            give(role, request, now_s)

        def give(role: Role, request: _Request, now_s: float, output: tuple[int, ...] = ()) -> None:
            engine = self.engines[role]
            sequence = engine.add(
                request.num_tokens,
                max_tokens=1 if role is Role.PREFILL else 32,
                output=output,
                is_pulled=bool(output),
            )
            sequence.arrived_s = now_s
            self.owners[sequence] = request
            wake(role, now_s)

        def wake(role: Role, now_s: float) -> None:
            if role in self.asleep:
                self.asleep.remove(role)
                at(now_s, lambda s: step(role, s))

        def step(role: Role, now_s: float) -> None:
            engine = self.engines[role]
            engine.now_s = now_s
            num_ended, num_started = len(engine.finished), len(engine.first_token_s)
            schedule = engine.step()
            for sequence in schedule.pulls:
                at(now_s + self.pull_s, lambda s, sequence=sequence: pulled(sequence, s))
            if not schedule.slices:
                self.asleep.add(role)
                return
            if schedule.num_decoding:
                self.gaps_s.append(engine.now_s - now_s)
            started = [*engine.first_token_s][num_started:]
            ended = engine.finished[num_ended:]
            at(engine.now_s, lambda s: stepped(role, started, ended, s))

        def stepped(
            role: Role, started: list[Sequence], ended: list[Sequence], now_s: float
        ) -> None:
            for sequence in started:
                request = self.owners[sequence]
                request.first_token_s = request.first_token_s or now_s
                if role is Role.PREFILL or request.placement.path is Path.LOCAL:
                    self.router.prefilled(request.placement, role, now_s)
                if role is Role.PREFILL:
                    give(Role.DECODE, request, now_s, output=(1,))
            for sequence in ended:
                if role is Role.DECODE:
                    self.owners[sequence].ended_s = now_s
                    self.router.ended(self.owners[sequence].placement)
            step(role, now_s)

        def pulled(sequence: Sequence, now_s: float) -> None:
            self.engines[Role.DECODE].scheduler.pulled(sequence)
            wake(Role.DECODE, now_s)
            self.router.pulled(self.owners[sequence].placement, Role.DECODE, now_s)

        for request in requests:
            at(request.arrived_s, lambda s, request=request: arrive(request, s))
        for role in Role:
            at(0.0, lambda s, role=role: step(role, s))
        while not all(request.ended_s for request in requests):
            now_s, _, what = heapq.heappop(events)
            what(now_s)

    def _loads(self, now_s: float) -> Iterable[WorkerLoad]:
        for role, engine in self.engines.items():
            scheduler = engine.scheduler
            load = Load(
                role=role,
                num_running=scheduler.num_running,
                num_waiting_tokens=scheduler.num_waiting_tokens,
                num_blocks=4000,
                step_s=scheduler.step_s,
                prefill_tokens_per_s=scheduler.prefill_tokens_per_s,
            )
            yield WorkerLoad(role, "a", load, now_s)


def _requests(lengths: list[int], gap_s: float) -> list[_Request]:
    return [_Request(0.001 + i * gap_s, length) for i, length in enumerate(lengths)]


def _mixed(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.choice([64, 64, 64, 1024, 1024]) for _ in range(count)]


def test_neither_engine_idles_while_prompts_queue_at_the_other() -> None:
    requests = _requests([1024] * 16, gap_s=0.01)
    _TwoEngines(Policy.AUTO).run(requests)
    last_s = {
        path: max(r.first_token_s for r in requests if r.placement and r.placement.path is path)
        for path in Path
    }
    one_prompt_s = 8 * _step_cost(0, 128)
    assert abs(last_s[Path.REMOTE] - last_s[Path.LOCAL]) < 2 * one_prompt_s, (
        "both worked to the end"
    )


@pytest.mark.parametrize("gap_s", [0.0, 0.4, 1.0, 3.0])
@pytest.mark.parametrize("seed", [1, 2])
def test_auto_is_about_as_good_as_the_better_fixed_policy(gap_s: float, seed: int) -> None:
    ttft_s = {}
    for policy in (Policy.AUTO, Policy.ALWAYS, Policy.NEVER):
        requests = _requests(_mixed(seed, 40), gap_s)
        _TwoEngines(policy).run(requests)
        ttft_s[policy] = statistics.mean(r.first_token_s - r.arrived_s for r in requests)
    assert ttft_s[Policy.AUTO] < 1.1 * min(ttft_s.values())


def test_auto_keeps_the_itl_bound() -> None:
    both = _TwoEngines(Policy.AUTO, max_itl_s=0.1)
    both.run(_requests(_mixed(3, 60), gap_s=0.3))
    too_long = [gap_s for gap_s in both.gaps_s if gap_s > 0.11]
    assert len(too_long) < 0.04 * len(both.gaps_s), "and those while it learns"


# ---- many workers --------------------------------------------------------------------------------

NUM_WORKERS = 64
TOKENS_PER_S = 2000.0


@dataclass
class _Worker:
    """Prefills one prompt after the other, and caches what fits."""

    name: str
    free_s: float = 0.0
    cache: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    num_computed: int = 0

    def prefill(self, hashes: list[bytes], num_tokens: int, now_s: float) -> float:
        """When it will have computed the prompt; counts what it computes."""
        num_cached = 0
        for block in hashes[: (num_tokens - 1) // BLOCK_SIZE]:
            if block not in self.cache:
                break
            num_cached += BLOCK_SIZE
        for block in reversed(hashes):
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) > 4000:
            self.cache.popitem(last=False)
        self.num_computed += num_tokens - num_cached
        self.free_s = max(self.free_s, now_s) + (num_tokens - num_cached) / TOKENS_PER_S
        return self.free_s

    def load(self, now_s: float) -> WorkerLoad:
        waiting = max(0.0, self.free_s - now_s) * TOKENS_PER_S
        load = Load(
            role=Role.PREFILL,
            num_waiting_tokens=int(waiting),
            num_blocks=4000,
            prefill_tokens_per_s=TOKENS_PER_S,
        )
        return WorkerLoad(self.name, "a", load, now_s)


@pytest.mark.parametrize("skew", [0.0, 1.0], ids=["even", "skewed"])
def test_64_workers_share_the_load_and_keep_the_prefixes(skew: float) -> None:
    """60 prefixes of 512 tokens, each prompt goes on with 128 of its own. Reports come every
    half second. The oracle has one cache for all, which forgets nothing.
    """
    draw = random.Random(5)
    prefixes = [[draw.randrange(30000) for _ in range(512)] for _ in range(60)]
    weights = [1 / (rank + 1) ** skew for rank in range(60)]
    settings = OrchestratorSettings(policy=Policy.ALWAYS, block_size=BLOCK_SIZE)
    router = Router(settings, MetricsBuffer())
    workers = {f"p{i}": _Worker(f"p{i}") for i in range(NUM_WORKERS)}
    seen: set[int] = set()
    running: list[tuple[float, int, Placement]] = []
    now_s = reported_s = 0.0
    loads = [worker.load(0.0) for worker in workers.values()]
    num_tokens = num_oracle_hits = 0
    for number in range(5000):
        now_s += draw.expovariate(0.6 * NUM_WORKERS * TOKENS_PER_S / (128 + 16))
        [prefix] = draw.choices(range(60), weights)
        prompt = [*prefixes[prefix], *(draw.randrange(30000) for _ in range(128))]
        num_tokens += len(prompt)
        num_oracle_hits += 512 if prefix in seen else 0
        seen.add(prefix)
        while running and running[0][0] <= now_s:
            ended_s, _, placement = heapq.heappop(running)
            router.prefilled(placement, str(placement.prefill), ended_s)
            router.ended(placement)
        if now_s - reported_s > 0.5:
            reported_s = now_s
            loads = [worker.load(now_s) for worker in workers.values()]
        hashes = block_hashes(prompt, BLOCK_SIZE)
        placement = router.place(str(number), len(prompt), hashes, loads, now_s)
        ended_s = workers[str(placement.prefill)].prefill(hashes, len(prompt), now_s)
        heapq.heappush(running, (ended_s, number, placement))
    computed = [worker.num_computed for worker in workers.values()]
    mean = statistics.mean(computed)
    assert max(computed) < 1.1 * mean and min(computed) > 0.9 * mean
    hit_rate = 1 - sum(computed) / num_tokens
    assert hit_rate > num_oracle_hits / num_tokens - 0.05
