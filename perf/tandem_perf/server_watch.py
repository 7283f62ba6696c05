"""Looks at a server while a load runs: /metrics and /proc, every half second, from a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil

from tandem_perf.metrics_text import Sample, parse_samples, total
from tandem_perf.processes import ProcessTree, ProcessUsage
from tandem_perf.records import RecordWriter
from tandem_perf.server_side import ServerSide, Snapshot, server_side
from tandem_perf.timeline import TimelineRow, worker_states

PERIOD_S = 0.5
SETTLE_S = 0.8  # engines report twice a second; their last steps must be in the last scrape
METRICS_PREFIX = "tandem_"
_SCRAPE_TIMEOUT_S = 2.0


class ServerWatch:
    """``metrics_url`` and ``pid`` are optional each: what is not given is not measured.

    ``start`` takes the snapshot before the run, ``finish`` the one after it. Raises
    psutil.NoSuchProcess for a pid that does not exist.
    """

    def __init__(self, metrics_url: str | None, pid: int | None) -> None:
        self._metrics_url = metrics_url
        self._client = httpx.Client(timeout=_SCRAPE_TIMEOUT_S, verify=False)
        self._tree = None if pid is None else ProcessTree(pid)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._peak_rss: dict[str, int] = {}
        self._lost_samples = 0
        self._before: Snapshot | None = None

    def prepare(self) -> None:
        """The snapshot before the run; takes a few milliseconds."""
        samples, _ = self._scrape()
        self._before = Snapshot(time.perf_counter(), samples, self._usage())

    def start(self, timeline: Path, clock: Callable[[], float]) -> None:
        assert self._before is not None, "prepare comes first"
        self._thread = threading.Thread(
            target=self._follow, args=(timeline, clock), name="server-watch", daemon=True
        )
        self._thread.start()

    def finish(self, num_tokens: int) -> ServerSide:
        """Waits until the server has reported its last steps."""
        assert self._before is not None
        ended_s = time.perf_counter()
        if self._metrics_url is not None:
            self._stopping.wait(SETTLE_S)
        self.close()
        samples, _ = self._scrape()
        after = Snapshot(ended_s, samples, self._usage())
        return server_side(
            self._before,
            after,
            num_tokens=num_tokens,
            peak_rss_bytes=self._peak_rss,
            lost_samples=self._lost_samples,
        )

    def close(self) -> None:
        """Ends the thread; may be called again."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout=_SCRAPE_TIMEOUT_S + 5)
            self._thread = None

    def _follow(self, timeline: Path, clock: Callable[[], float]) -> None:
        next_s = clock()
        with RecordWriter(timeline) as writer:
            while not self._stopping.is_set():
                writer.write(self._row(clock()))
                next_s = max(next_s + PERIOD_S, clock())
                self._stopping.wait(next_s - clock())

    def _row(self, at_s: float) -> TimelineRow:
        samples, error = self._scrape()
        self._lost_samples += bool(error)
        usages = self._usage()
        for kind, usage in usages.items():
            self._peak_rss[kind] = max(self._peak_rss.get(kind, 0), usage.rss_bytes)
        return TimelineRow(
            at_s=at_s,
            requests_live=total(samples, "tandem_requests_live"),
            workers=worker_states(samples),
            processes=usages,
            error=error,
        )

    def _scrape(self) -> tuple[list[Sample], str]:
        if self._metrics_url is None:
            return [], ""
        try:
            response = self._client.get(self._metrics_url).raise_for_status()
            return parse_samples(response.text, METRICS_PREFIX), ""
        except (httpx.HTTPError, ValueError) as error:
            return [], f"{type(error).__name__}: {error}"

    def _usage(self) -> dict[str, ProcessUsage]:
        try:
            return {} if self._tree is None else self._tree.usage()
        except psutil.Error:
            return {}
