"""Measures deployments in turn: A B A B, one server up at a time, the same requests for each."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
from rich.console import Console

from tandem_cli.errors import CliError
from tandem_perf.arrivals import ClosedLoop, PoissonArrivals, describe
from tandem_perf.calibration import Budget, Calibration, num_requests_for, rate_for
from tandem_perf.comparison import comparison_rows
from tandem_perf.comparison_result import ComparisonResult, Fault
from tandem_perf.comparison_table import run_line
from tandem_perf.deployments import Deployment, Endpoint, on_cores
from tandem_perf.provenance import Provenance
from tandem_perf.run import run_load
from tandem_perf.run_config import RunConfig
from tandem_perf.summary import Summary

RUNS = "runs"
_CALIBRATION_REQUESTS, _CALIBRATION_CONCURRENCY = 10, 8
_CALIBRATION_SEED_OFFSET = 2_000_003  # prompts that no measured run has
_MIN_SWEEP_REQUESTS = 10


@dataclass(frozen=True, kw_only=True)
class ComparisonPlan:
    """``load``: what to send; its target, url and folder are filled in for each run.
    ``budget_s``: None keeps the number of requests. ``load_share``: open loop at this share of
    the first deployment's capacity; None keeps the arrivals. ``sweep``: rates of further runs of
    ``sweep_s`` seconds, in the last round.
    """

    deployments: Sequence[Deployment]
    rounds: int
    load: RunConfig
    cores: frozenset[int] | None = None
    budget_s: float | None = None
    load_share: float | None = None
    sweep: tuple[float, ...] = ()
    sweep_s: float = 30.0


class ComparisonRun:
    """Owned by one thread. A deployment that does not start costs its run, not the comparison."""

    def __init__(
        self,
        plan: ComparisonPlan,
        console: Console,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan = plan
        self._load = plan.load
        self._console = console
        self._clock = clock
        self._started_s = clock()
        self._is_calibrated = plan.budget_s is None and plan.load_share is None
        self._runs: dict[str, dict[int, Summary]] = {d.name: {} for d in plan.deployments}
        self._facts: dict[str, dict[str, str]] = {}
        self._faults: list[Fault] = []
        self._digest: str | None = None
        self._was_stopped = False

    def run(self, provenance: Provenance) -> ComparisonResult:
        """Ctrl-C or SIGTERM ends it; what was measured until then is in the result."""
        _interrupt_on_sigterm()
        with contextlib.suppress(KeyboardInterrupt):
            for number in range(1, self._plan.rounds + 1):
                for deployment in self._plan.deployments:
                    self._visit(deployment, number)
                    if self._was_stopped:
                        raise KeyboardInterrupt
            return self._result(provenance)
        self._was_stopped = True
        return self._result(provenance)

    def _result(self, provenance: Provenance) -> ComparisonResult:
        return ComparisonResult(
            deployments=tuple(self._runs),
            rounds=self._plan.rounds,
            facts=self._facts,
            faults=tuple(self._faults),
            interrupted=self._was_stopped,
            rows=comparison_rows(self._runs),
            provenance=provenance,
        )

    def _visit(self, deployment: Deployment, number: int) -> None:
        folder = self._plan.load.out_dir / RUNS / deployment.name
        out = folder / f"round-{number}"
        out.mkdir(parents=True, exist_ok=True)
        started_s = self._clock()
        try:
            with contextlib.ExitStack() as stack:
                with (
                    self._console.status(f"starting {deployment.name}"),
                    on_cores(self._plan.cores),
                ):
                    endpoint = stack.enter_context(deployment.running(out / "server.log"))
                start_s = self._clock() - started_s
                self._facts[deployment.name] = endpoint.facts | {"start": f"{start_s:.1f} s"}
                if not self._is_calibrated:
                    self._calibrate(endpoint, folder / "calibration", start_s)
                self._measure(deployment.name, number, endpoint, out)
                if number == self._plan.rounds and not self._was_stopped:
                    self._sweep(deployment.name, endpoint, folder)
        except (CliError, OSError, httpx.HTTPError) as error:
            self._fault(deployment.name, number, str(error) or type(error).__name__)

    def _measure(self, name: str, number: int, endpoint: Endpoint, out: Path) -> None:
        summary = self._send(self._load, name, endpoint, out)
        self._was_stopped = summary.interrupted
        if summary.interrupted:
            self._fault(name, number, "stopped before its end")
            return
        if self._digest is None:
            self._digest = summary.request_digest
        if summary.request_digest != self._digest:
            self._fault(name, number, f"sent other requests: digest {summary.request_digest}, "
                                      f"the first run had {self._digest}")  # fmt: skip
            return
        if summary.statistics.overall.completed == 0:
            first = next(iter(summary.statistics.errors), "no request completed")
            self._fault(name, number, first)
            return
        self._runs[name][number] = summary
        self._console.print(run_line(summary, number, self._plan.rounds), highlight=False)

    def _send(self, load: RunConfig, name: str, endpoint: Endpoint, out: Path) -> Summary:
        summary = run_load(_for_endpoint(load, name, endpoint, out), self._console)
        _interrupt_on_sigterm()  # the run's event loop had handlers of its own
        return summary

    def _sweep(self, name: str, endpoint: Endpoint, folder: Path) -> None:
        for rate in self._plan.sweep:
            load = replace(
                self._load,
                arrivals=PoissonArrivals(rate),
                num_requests=max(_MIN_SWEEP_REQUESTS, round(rate * self._plan.sweep_s)),
                warm_up=0,
            )
            out = folder / f"rate-{rate:.3f}"
            summary = self._send(load, name, endpoint, out)
            self._console.print(run_line(summary, 0, 0), highlight=False)
            if summary.interrupted:
                self._was_stopped = True
                return

    def _calibrate(self, endpoint: Endpoint, out: Path, start_s: float) -> None:
        short = replace(
            self._load,
            arrivals=ClosedLoop(_CALIBRATION_CONCURRENCY),
            num_requests=_CALIBRATION_REQUESTS,
            seed=self._load.seed + _CALIBRATION_SEED_OFFSET,
        )
        summary = self._send(short, "calibration", endpoint, out)
        figures = summary.statistics
        latency_s = figures.overall.latencies.e2e.p50
        if summary.interrupted:
            raise KeyboardInterrupt
        if latency_s is None or figures.errors:
            first = next(iter(figures.errors), "no request completed")
            raise CliError(f"calibration: {figures.overall.failed} requests failed: {first}")
        calibration = Calibration(
            start_s=start_s, requests_per_s=figures.requests_per_s, latency_s=latency_s
        )
        self._apply(calibration)
        self._is_calibrated = True

    def _apply(self, calibration: Calibration) -> None:
        plan = self._plan
        if plan.load_share is not None:
            rate = PoissonArrivals(rate_for(plan.load_share, calibration))
            self._load = replace(self._load, arrivals=rate)
        arrivals = self._load.arrivals
        assert isinstance(arrivals, PoissonArrivals | ClosedLoop)
        if plan.budget_s is not None:
            budget = Budget(
                left_s=plan.budget_s - (self._clock() - self._started_s),
                num_visits=len(plan.deployments) * plan.rounds,
                warm_up=self._load.warm_up,
            )
            num_requests = num_requests_for(arrivals, budget, calibration)
            self._load = replace(self._load, num_requests=num_requests)
        self._console.print(
            f"calibration: ready after {calibration.start_s:.1f} s, "
            f"{calibration.requests_per_s:.2f} requests/s → {describe(arrivals)}, "
            f"{self._load.num_requests or 'default'} requests a run",
            highlight=False,
        )

    def _fault(self, deployment: str, number: int, message: str) -> None:
        self._faults.append(Fault(deployment=deployment, round=number, message=message))
        self._console.print(f"[red]{deployment}, round {number}:[/red]", end=" ")
        self._console.print(message, markup=False, highlight=False)


def _interrupt_on_sigterm() -> None:
    """Servers must be stopped, not left: SIGTERM becomes what Ctrl-C is."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def _for_endpoint(load: RunConfig, name: str, endpoint: Endpoint, out: Path) -> RunConfig:
    options = replace(load.target_options, url=endpoint.url, model=endpoint.model)
    return replace(
        load,
        target=endpoint.target,
        target_options=options,
        deployment=name,
        out_dir=out,
        metrics_url=endpoint.metrics_url,
        server_pid=endpoint.pid,
    )
