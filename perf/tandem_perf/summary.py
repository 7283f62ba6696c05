"""``summary.json``: all figures of one run, and what is needed to repeat it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tandem_perf.machine import Machine
from tandem_perf.server_side import ServerSide
from tandem_perf.statistics import Statistics


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """``arrivals``: e.g. "poisson 2.5/s", "concurrency 8". ``request_digest``: equal in two runs
    if and only if they sent the same requests (``requests_prepared`` of them). ``slo``: limits in
    seconds. ``interrupted``: stopped before its end. ``warm_up_failed``: of ``warm_up`` requests,
    which are in no other figure. ``started_at``: UTC, ISO 8601.
    """

    deployment: str
    workload: str
    target: str
    url: str
    arrivals: str
    rate: float | None
    concurrency: int | None
    seed: int
    request_digest: str
    requests_prepared: int
    slo: dict[str, float]
    started_at: str
    interrupted: bool
    warm_up: int
    warm_up_failed: int
    statistics: Statistics
    server_side: ServerSide | None
    machine: Machine

    @property
    def has_failed(self) -> bool:
        overall = self.statistics.overall
        return overall.failed > 0 or overall.completed == 0


def write_json(path: Path, value: msgspec.Struct) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


def read_summary(path: Path) -> Summary:
    return msgspec.json.decode(path.read_bytes(), type=Summary)
