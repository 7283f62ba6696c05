"""Which way a request takes and which workers serve it. Pure: no clock, no I/O.

::

    remote:  wait for prefill + prompt / its rate + hand-over / rate of pulls + join the batch
    local:   wait at decode   + prompt / the rate that its ITL bound leaves

Policy ``auto`` takes the way that is expected to end earlier, by what the workers measure of
themselves and what this orchestrator has given them. A local prefill is charged for what it takes
from the streams that decode beside it, so that it serves bursts and does not become the rule. A
prompt's cached prefix costs nothing, so requests go where it is unless too much waits there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tandem.config import OrchestratorSettings
from tandem.metrics import MetricsBuffer
from tandem.orchestrator.path_costs import Path, PathCosts
from tandem.orchestrator.worker_view import WorkerView
from tandem.types import Policy, Role, WorkerLoad


@dataclass(eq=False)
class Placement:
    """Where one attempt at a request goes, and what was expected of it. The times are from
    ``placed_s`` to when it decodes; infinite: this way was not open.
    """

    sequence_id: str
    path: Path
    hashes: Sequence[bytes]  # of the full blocks of its tokens
    placed_s: float
    prefill: str | None  # worker, None where none is known
    decode: str | None
    expected_s: Mapping[Path, float]


class Router:
    """Owned by the orchestrator's event loop. Call ``prefilled``, ``pulled`` and ``ended`` as a
    placement goes on: this is what it learns from.
    """

    def __init__(self, settings: OrchestratorSettings, metrics: MetricsBuffer) -> None:
        self._settings = settings
        self._views: dict[str, WorkerView] = {}  # by worker
        self._costs = PathCosts(metrics)
        self._had_prefill = False

    def place(
        self,
        sequence_id: str,
        num_tokens: int,
        hashes: Sequence[bytes],
        workers: Iterable[WorkerLoad],
        now_s: float,
        wanted: Path | None = None,
    ) -> Placement:
        """``hashes`` name the full blocks of the sequence's ``num_tokens``; ``workers`` are all
        that live. A ``wanted`` path is taken, whatever the policy."""
        self._look_at(workers, now_s)
        # The last token is always computed: its logits give the next one.
        matchable = hashes[: (num_tokens - 1) // self._settings.block_size]
        uncached = {
            view: num_tokens - view.num_cached_tokens(matchable) for view in self._views.values()
        }
        ways = {Path.REMOTE: _remote(uncached), Path.LOCAL: _local(uncached)}
        expected_s = {
            path: way.expected_s + self._costs.overhead_s(path) for path, way in ways.items()
        }
        prices_s = dict(expected_s)
        if (decode := ways[Path.LOCAL].decode) is not None:
            prices_s[Path.LOCAL] += decode.disturbance_s(uncached[decode])
        path = wanted or self._choose(min(uncached.values(), default=num_tokens), prices_s)
        way = ways[path]
        if way.prefill is not None:
            way.prefill.give(sequence_id, uncached[way.prefill])
        if way.decode is not None:
            way.decode.coming.add(sequence_id)
        return Placement(
            sequence_id=sequence_id,
            path=path,
            hashes=hashes,
            placed_s=now_s,
            prefill=way.prefill.name if way.prefill else None,
            decode=way.decode.name if way.decode else None,
            expected_s=expected_s,
        )

    def prefilled(self, placement: Placement, worker: str, now_s: float) -> None:
        """Its first token is there, and its KV at ``worker``; on the local path it decodes now."""
        if placement.prefill in self._views:
            self._views[placement.prefill].backlog.remove(placement.sequence_id)
        self._learn(placement, worker)
        if placement.path is Path.LOCAL:
            self._decodes(placement, now_s)

    def pulled(self, placement: Placement, worker: str, now_s: float) -> None:
        """Its KV has come to ``worker``, where it decodes now."""
        self._learn(placement, worker)
        self._decodes(placement, now_s)

    def ended(self, placement: Placement) -> None:
        """However it ended, its workers have nothing more to do for it."""
        for view in self._views.values():
            view.backlog.remove(placement.sequence_id)
            view.coming.discard(placement.sequence_id)

    def _choose(self, num_uncached: int, prices_s: Mapping[Path, float]) -> Path:
        match self._settings.policy:
            case Policy.NEVER:
                return Path.LOCAL
            case Policy.ALWAYS:
                return Path.REMOTE
            case Policy.LENGTH:
                is_short = num_uncached < self._settings.remote_prefill_min_tokens
                return Path.LOCAL if is_short else Path.REMOTE
            case Policy.AUTO if math.isinf(prices_s[Path.REMOTE]):
                # Nothing was heard of the prefill pool: nobody has called it yet, or it is dead.
                return Path.LOCAL if self._had_prefill else Path.REMOTE
        return Path.LOCAL if prices_s[Path.LOCAL] < prices_s[Path.REMOTE] else Path.REMOTE

    def _look_at(self, workers: Iterable[WorkerLoad], now_s: float) -> None:
        alive: dict[str, WorkerView] = {}
        for seen in workers:
            view = self._views.get(seen.worker)
            if view is None or view.incarnation != seen.incarnation:
                view = WorkerView(seen, self._settings.block_size)  # an empty cache, too
            view.update(seen, now_s)
            alive[seen.worker] = view
        self._views = alive
        self._had_prefill |= any(v.load.role is Role.PREFILL for v in alive.values())

    def _learn(self, placement: Placement, worker: str) -> None:
        if worker in self._views:
            self._views[worker].prefixes.add(placement.hashes)

    def _decodes(self, placement: Placement, now_s: float) -> None:
        if placement.decode in self._views:
            self._views[placement.decode].coming.discard(placement.sequence_id)
        self._costs.observe(placement.path, placement.expected_s, now_s - placement.placed_s)


class _Way(NamedTuple):
    """Workers for one path, None where none is known, and when the request would decode."""

    prefill: WorkerView | None
    decode: WorkerView | None
    expected_s: float


def _remote(uncached: Mapping[WorkerView, int]) -> _Way:
    """``uncached`` are the tokens of the request that each worker has not cached."""
    prefill = _cheapest(Role.PREFILL, lambda view: view.prefill_cost_s(uncached[view]), uncached)
    decode = _cheapest(Role.DECODE, lambda view: view.pull_cost_s(uncached[view]), uncached)
    if prefill is None:
        return _Way(None, decode, math.inf)
    pull_s = decode.pull_s(uncached[decode]) if decode else 0.0
    return _Way(prefill, decode, prefill.prefill_s(uncached[prefill]) + pull_s)


def _local(uncached: Mapping[WorkerView, int]) -> _Way:
    decode = _cheapest(Role.DECODE, lambda view: view.prefill_cost_s(uncached[view]), uncached)
    return _Way(decode, decode, decode.prefill_s(uncached[decode]) if decode else math.inf)


def _cheapest(
    role: Role, cost_s: Callable[[WorkerView], float], views: Iterable[WorkerView]
) -> WorkerView | None:
    """Of equals the one that was given the least."""
    return min(
        (view for view in views if view.load.role is role),
        key=lambda view: (cost_s(view), view.num_given),
        default=None,
    )
