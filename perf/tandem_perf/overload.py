"""Ten times the load for a minute, on a server of its own: ``python -m tandem_perf.overload``.

Capacity is measured closed-loop first, then the overload open-loop (Poisson), then half the
capacity, at once after it. A table: what refusals take, what is served, memory, recovery.
"""

from __future__ import annotations

import argparse
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tandem_cli.server import TandemServer
from tandem_perf.arrivals import Arrivals, ClosedLoop, PoissonArrivals
from tandem_perf.percentiles import distribution
from tandem_perf.processes import ProcessTree
from tandem_perf.records import Outcome, RequestRecord, read_records
from tandem_perf.run import RECORDS, run_load
from tandem_perf.run_config import RunConfig
from tandem_perf.targets.base import TargetOptions

MIB = 1 << 20
REFUSED = "overloaded, "  # so begins what a full queue answers, after its code


@dataclass
class Phase:
    """One run: its records, how long it sent, and the server's memory while it ran (bytes)."""

    seconds: float
    records: list[RequestRecord]
    rss: list[int] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        """Requests/s that were answered to their end while the load was on."""
        ended = (r for r in self.records if r.is_ok and r.ended_s <= self.seconds)
        return sum(1 for _ in ended) / self.seconds

    @property
    def refused(self) -> list[RequestRecord]:
        return [r for r in self.records if r.outcome is Outcome.ERROR and REFUSED in r.error]

    @property
    def other_failures(self) -> Counter[str]:
        failed = (r for r in self.records if not r.is_ok and r not in self.refused)
        return Counter(r.error[:80] for r in failed)


class Run:
    def __init__(self, server: TandemServer, arguments: argparse.Namespace) -> None:
        self._server = server
        self._arguments = arguments
        self._console = Console()

    def phase(self, name: str, arrivals: Arrivals, seconds: float, seed: int) -> Phase:
        config = RunConfig(
            target="triton-grpc",
            target_options=TargetOptions(url=f"grpc://{self._server.grpc_address}"),
            workload=self._arguments.workload,
            arrivals=arrivals,
            out_dir=self._arguments.out / name,
            deployment=name,
            duration_s=seconds,
            seed=seed,
            warm_up=4 if name == "capacity" else 0,
        )
        phase = Phase(seconds, [])
        with self._memory(phase.rss):
            run_load(config, self._console)
        phase.records = list(read_records(config.out_dir / RECORDS))
        return phase

    @contextmanager
    def _memory(self, rss: list[int]) -> Iterator[None]:
        tree = ProcessTree(self._server.pid)
        stopping = threading.Event()

        def sample() -> None:
            while not stopping.is_set():
                rss.append(sum(usage.rss_bytes for usage in tree.usage().values()))
                stopping.wait(1.0)

        thread = threading.Thread(target=sample, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopping.set()
            thread.join()


def table(capacity: Phase, overload: Phase, recovery: Phase) -> Table:
    refusal = distribution(r.ended_s - r.sent_s for r in overload.refused if r.sent_s is not None)
    shown = Table(title="overload")
    for title in ("figure", "value"):
        shown.add_column(title)
    for name, value in (
        ("capacity, requests/s", f"{capacity.goodput:.2f}"),
        ("offered under overload, requests/s", f"{len(overload.records) / overload.seconds:.2f}"),
        ("served under overload, requests/s", f"{overload.goodput:.2f}"),
        ("of capacity", f"{overload.goodput / capacity.goodput:.0%}"),
        ("refused", f"{len(overload.refused)} of {len(overload.records)}"),
        ("a refusal takes, ms: p50 / p99 / max", _ms(refusal.p50, refusal.p99, refusal.max)),
        ("TTFT of the accepted, ms: p50 / p99", _ttft(overload)),
        ("other failures", str(dict(overload.other_failures))),
        ("memory, MiB: before / most / after", _mib(overload, recovery)),
        ("refused after it, at half capacity", f"{len(recovery.refused)}"),
        ("TTFT after it, ms: p50 / p99", _ttft(recovery)),
    ):
        shown.add_row(name, value)
    return shown


def _ms(*seconds: float | None) -> str:
    return " / ".join("–" if s is None else f"{s * 1e3:.0f}" for s in seconds)


def _ttft(phase: Phase) -> str:
    found = distribution(r.ttft_s for r in phase.records if r.is_ok)
    return _ms(found.p50, found.p99)


def _mib(overload: Phase, recovery: Phase) -> str:
    values = (overload.rss[0], max(overload.rss), recovery.rss[-1])
    return " / ".join(f"{value / MIB:.0f}" for value in values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of overload")
    parser.add_argument("--factor", type=float, default=10.0, help="times the capacity")
    parser.add_argument("--concurrency", type=int, default=16, help="of the capacity run")
    parser.add_argument("--workload", default="mixed-60-40")
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--queue-tokens", type=int, default=4096, help="max_queued_tokens")
    parser.add_argument("--out", type=Path, default=Path("build/overload"))
    arguments = parser.parse_args()
    settings = (f"llm.max_queued_tokens={arguments.queue_tokens}",)
    with TandemServer(
        policy=arguments.policy,
        log_level="warning",
        settings=settings,
        http_port=0,
        grpc_port=0,
        metrics_port=0,
    ) as server:
        run = Run(server, arguments)
        capacity = run.phase("capacity", ClosedLoop(arguments.concurrency), 30.0, seed=1)
        rate = capacity.goodput
        overload = run.phase(
            "overload", PoissonArrivals(arguments.factor * rate), arguments.seconds, seed=2
        )
        recovery = run.phase("recovery", PoissonArrivals(rate / 2), 15.0, seed=3)
    Console().print(table(capacity, overload, recovery))


if __name__ == "__main__":
    main()
