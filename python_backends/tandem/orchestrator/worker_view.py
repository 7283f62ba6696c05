"""One worker as the router sees it: its newest report, and what was given to it since."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tandem.orchestrator.backlog import Backlog
from tandem.orchestrator.prefix_index import PrefixIndex
from tandem.types import Role, WorkerLoad

_HORIZON_STEPS = 32  # crowding counts as if an output had so many tokens


class WorkerView:
    """Owned by the router. Of one incarnation: another one has another cache."""

    def __init__(self, seen: WorkerLoad, block_size: int) -> None:
        self.name = seen.worker
        self.incarnation = seen.incarnation
        self.load = seen.load
        self.prefixes = PrefixIndex(max(seen.load.num_blocks, 1))
        self.backlog = Backlog()
        self.coming: set[str] = set()  # sequences that will decode here and do not yet
        self.num_given = 0  # tokens, ever: breaks ties
        self._block_size = block_size
        self._heard_s = seen.heard_s
        self._now_s = seen.heard_s

    def update(self, seen: WorkerLoad, now_s: float) -> None:
        self.load, self._heard_s, self._now_s = seen.load, seen.heard_s, now_s
        self.backlog.drain(now_s, seen.load.prefill_tokens_per_s)

    def num_cached_tokens(self, hashes: Sequence[bytes]) -> int:
        return self.prefixes.num_cached(hashes) * self._block_size

    def give(self, sequence_id: str, num_tokens: int) -> None:
        """A prompt to prefill; ``num_tokens`` of it are not cached."""
        self.backlog.add(sequence_id, num_tokens)
        self.num_given += num_tokens

    def prefill_s(self, num_uncached: int) -> float:
        """Until a prompt given to it now is prefilled; infinite if its ITL bound forbids that."""
        rate = self.load.prefill_tokens_per_s
        if rate == 0:
            return math.inf
        aged = self.load.num_waiting_tokens - rate * (self._now_s - self._heard_s)
        ahead = self.backlog.ahead_of(num_uncached, max(0.0, aged))
        return self._step_under_way_s + (ahead + num_uncached) / rate

    def pull_s(self, num_tokens: int) -> float:
        """Until so many tokens of KV are here and the sequence is in the batch."""
        rate = self.load.pull_tokens_per_s
        return self._step_under_way_s + (num_tokens / rate if rate else 0.0)

    def prefill_cost_s(self, num_uncached: int) -> float:
        """What to choose a worker by: its own computation counts twice, as others will wait for
        it. So a prefix is only computed again elsewhere if that saves as much time as it takes.
        """
        rate = self.load.prefill_tokens_per_s
        work_s = num_uncached / rate if rate else 0.0
        return self.prefill_s(num_uncached) + work_s + self._crowding_s

    def disturbance_s(self, num_uncached: int) -> float:
        """What its running streams lose, summed over them, while it prefills so many tokens."""
        rate = self.load.prefill_tokens_per_s
        return self.load.num_running * num_uncached / rate if rate else 0.0

    def pull_cost_s(self, num_tokens: int) -> float:
        return self.pull_s(num_tokens) + self._crowding_s

    @property
    def _crowding_s(self) -> float:
        """What decoding here costs: those that are still to come will make its steps longer."""
        if self.load.role is Role.PREFILL:
            return 0.0
        busier = (self.load.num_running + len(self.coming) + 1) / (self.load.num_running + 1)
        return _HORIZON_STEPS * self.load.step_s * busier

    @property
    def _step_under_way_s(self) -> float:
        is_busy = self.load.num_running > 0 or self.backlog.num_tokens > 0
        return self.load.step_s / 2 if is_busy else 0.0
