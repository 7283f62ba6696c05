"""How much load fits a time budget: from what a short closed-loop run showed."""

from __future__ import annotations

from dataclasses import dataclass

from tandem_perf.arrivals import ClosedLoop, PoissonArrivals
from tandem_perf.workloads.mixed import GROUP

MIN_REQUESTS = 10
_GROUP = len(GROUP)  # whole groups, so that every run has the exact mix
_STOP_S = 4.0  # stopping a server, its last metrics, writing files
_REPORT_S = 12.0
_SAFETY = 0.85  # other deployments may be slower than the calibrated one


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """``start_s``: until a deployment was ready. ``requests_per_s``, ``latency_s``: completed, and
    end to end of a request, in the short run.
    """

    start_s: float
    requests_per_s: float
    latency_s: float


@dataclass(frozen=True, kw_only=True)
class Budget:
    """``left_s``: from now to the end of the report. ``num_visits``: runs to come, of which the
    first one's server is up already. ``warm_up``: requests before each run.
    """

    left_s: float
    num_visits: int
    warm_up: int


def rate_for(share: float, calibration: Calibration) -> float:
    """Two significant digits, so that it can be typed again."""
    return float(f"{share * calibration.requests_per_s:.2g}")


def num_requests_for(
    arrivals: PoissonArrivals | ClosedLoop, budget: Budget, calibration: Calibration
) -> int:
    """Requests of one run; at least 10, even if the budget is too small for that."""
    warm_up_s = budget.warm_up / calibration.requests_per_s
    overhead_s = (
        _REPORT_S
        + (budget.num_visits - 1) * calibration.start_s
        + budget.num_visits * (_STOP_S + warm_up_s)
    )
    run_s = (budget.left_s - overhead_s) / budget.num_visits * _SAFETY
    if isinstance(arrivals, ClosedLoop):
        wanted = run_s * calibration.requests_per_s
    else:
        wanted = (run_s - calibration.latency_s) * arrivals.rate
    return max(MIN_REQUESTS, int(wanted) // _GROUP * _GROUP)
