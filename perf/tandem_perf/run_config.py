"""All that defines one measured run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tandem_perf.arrivals import Arrivals
from tandem_perf.slo import Slo
from tandem_perf.targets.base import TargetOptions
from tandem_perf.workloads.base import WorkloadOptions


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """``num_requests``: None is 60, or as many as ``duration_s`` or a file allows.
    ``metrics_url``, ``server_pid``: what to watch, if anything. ``tokenizer``: send text that
    tokenizes to the exact length, not token ids.
    """

    target: str
    target_options: TargetOptions
    workload: str
    arrivals: Arrivals
    out_dir: Path
    deployment: str = "default"
    workload_options: WorkloadOptions = field(default_factory=WorkloadOptions)
    tokenizer: Path | None = None
    num_requests: int | None = None
    duration_s: float | None = None
    seed: int = 0
    warm_up: int = 4
    max_in_flight: int = 10_000
    slo: Slo = field(default_factory=Slo)
    metrics_url: str | None = None
    server_pid: int | None = None
