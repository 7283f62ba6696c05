"""Which way a request takes. Pure: from lengths and loads to a path."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from tandem.config import OrchestratorSettings
from tandem.types import Load, Policy, Role


class Path(StrEnum):
    REMOTE = "remote"  # prefill pool, KV hand-over, decode pool
    LOCAL = "local"  # the decode worker prefills it, in chunks between its decode steps


def choose_path(
    settings: OrchestratorSettings, num_uncached_tokens: int, loads: Iterable[Load]
) -> Path:
    """``auto``: a short prompt stays local, where it costs one chunk and saves a hand-over; a long
    one goes to the prefill pool unless more work waits there, per worker, than at decode.
    """
    if settings.policy is Policy.NEVER:
        return Path.LOCAL
    if settings.policy is Policy.ALWAYS:
        return Path.REMOTE
    if num_uncached_tokens < settings.remote_prefill_min_tokens:
        return Path.LOCAL
    loads = list(loads)
    queued = {role: _waiting_tokens_per_worker(role, loads) for role in Role}
    excess = queued[Role.PREFILL] - queued[Role.DECODE]
    return Path.LOCAL if excess > settings.remote_prefill_max_queue_tokens else Path.REMOTE


def _waiting_tokens_per_worker(role: Role, loads: list[Load]) -> float:
    waiting = [load.num_waiting_tokens for load in loads if load.role is role]
    return sum(waiting) / len(waiting) if waiting else 0.0
