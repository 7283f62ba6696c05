"""What is measured at the server: metrics, processes, timeline."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest

from tandem_perf.metrics_text import parse_samples, total, totals_by
from tandem_perf.processes import ProcessTree, ProcessUsage
from tandem_perf.run_clock import RunClock
from tandem_perf.server_side import ServerSide, Snapshot, server_side
from tandem_perf.server_watch import ServerWatch
from tandem_perf.timeline import read_timeline, worker_states

METRICS = """\
# HELP nv_inference_count Number of inferences
nv_inference_count{model="llm",version="1"} 3
# TYPE tandem_path_total counter
tandem_path_total{orchestrator="llm_0",path="remote"} 30
tandem_path_total{orchestrator="llm_0",path="local"} 10
tandem_path_total{orchestrator="llm_1",path="local"} 2
tandem_reprefills_total{orchestrator="llm_0"} 1
tandem_requests_live{orchestrator="llm_0"} 4
tandem_requests_live{orchestrator="llm_1"} 1
tandem_running{role="decode",worker="decode_0_0"} 5
tandem_waiting{role="decode",worker="decode_0_0"} 2
tandem_engine_up{role="decode",worker="decode_0_0"} 1
tandem_kv_blocks{role="decode",state="free",worker="decode_0_0"} 90
tandem_kv_blocks{role="decode",state="used",worker="decode_0_0"} 10
tandem_running{role="prefill",worker="prefill_0_0"} 1
tandem_step_seconds_total{role="prefill",worker="prefill_0_0"} 1.5e+00
tandem_transfer_seconds_sum{orchestrator="llm_0"} 0.25
tandem_transfer_seconds_bucket{orchestrator="llm_0",le="+Inf"} 7
tandem_transfer_bytes_total{role="decode",worker="decode_0_0"} 1e6
tandem_transfers_total{outcome="ok",role="decode",worker="decode_0_0"} 7
tandem_odd{text="a\\"b\\\\c, d=\\"e\\""} 1
"""
SAMPLES = parse_samples(METRICS, "tandem_")


def test_samples_of_a_prefix_with_labels_and_escapes() -> None:
    assert not [sample for sample in SAMPLES if sample.name.startswith("nv_")]
    assert total(SAMPLES, "tandem_path_total") == 42
    assert total(SAMPLES, "tandem_path_total", path="local") == 12
    assert totals_by(SAMPLES, "tandem_path_total", "path") == {"remote": 30, "local": 12}
    assert total(SAMPLES, "tandem_no_such") == 0
    assert [s.labels for s in SAMPLES if s.name == "tandem_odd"] == [{"text": 'a"b\\c, d="e"'}]


def test_the_state_of_each_worker() -> None:
    decode, prefill = worker_states(SAMPLES)
    assert (decode.worker, decode.role) == ("decode_0_0", "decode")
    assert (decode.running, decode.waiting, decode.up) == (5, 2, 1)
    assert decode.kv_blocks == {"free": 90, "used": 10}
    assert (prefill.worker, prefill.running, prefill.step_s) == ("prefill_0_0", 1, 1.5)
    assert worker_states([]) == ()


def side(before: str, after: str, num_tokens: int = 100) -> ServerSide:
    return server_side(
        Snapshot(10.0, parse_samples(before, "tandem_"), {"engine": ProcessUsage(1.0, 5)}),
        Snapshot(14.0, parse_samples(after, "tandem_"), {"engine": ProcessUsage(3.0, 7)}),
        num_tokens=num_tokens,
        peak_rss_bytes={"engine": 9},
        lost_samples=0,
    )


def test_the_run_is_what_counters_grew_by() -> None:
    before = METRICS.replace('path="remote"} 30', 'path="remote"} 24').replace("1.5e+00", "0.5")
    result = side(before, METRICS)
    assert result.paths == {"remote": 6, "local": 0}
    assert result.path_shares == {"remote": 1.0, "local": 0.0}
    assert result.busy == {"prefill_0_0": 0.25}  # one second in four
    assert result.cpu_s == {"engine": 2.0}
    assert result.cpu_us_per_token == {"engine": pytest.approx(20_000)}
    assert result.kv_bytes == 0
    assert result.has_metrics


def test_a_counter_that_was_not_there_began_at_zero() -> None:
    result = side("tandem_x 1", METRICS)
    assert result.kv_bytes == 1e6
    assert result.transfer_s == 0.25
    assert result.transfers == {"ok": 7}
    assert result.reprefills == 1


def test_nothing_measured_is_empty_not_wrong() -> None:
    result = side("", "", num_tokens=0)
    assert not result.has_metrics
    assert result.path_shares == {}
    assert result.cpu_us_per_token == {}


def test_process_tree_counts_children_and_keeps_the_dead() -> None:
    program = "print(sum(range(4_000_000)), flush=True); input()"
    now_s = 0.0
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdin and child.stdout
        child.stdout.readline()
        tree = ProcessTree(psutil.Process().pid, clock=lambda: now_s)
        alive = tree.usage()
        (name,) = {psutil.Process(child.pid).name()}
        child.stdin.close()
        child.wait(5)
    now_s = 100.0
    dead = tree.usage()
    assert alive[name].cpu_s > 0
    assert alive[name].rss_bytes > 1_000_000
    assert dead[name].cpu_s >= alive[name].cpu_s


def test_no_such_process() -> None:
    with pytest.raises(psutil.NoSuchProcess):
        ProcessTree(2**22 + 1)


@contextmanager
def metrics_server() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(METRICS.encode())

        def log_message(self, *args: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_watch_writes_the_timeline(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    with metrics_server() as url:
        watch = ServerWatch(url, psutil.Process().pid)
        watch.prepare()
        watch.start(path, RunClock())
        result = watch.finish(num_tokens=10)
    rows = list(read_timeline(path))
    assert rows[0].requests_live == 5
    assert [worker.worker for worker in rows[0].workers] == ["decode_0_0", "prefill_0_0"]
    assert rows[0].processes
    assert rows[0].at_s < 0.5
    assert [row.at_s for row in rows] == sorted(row.at_s for row in rows)
    assert result.has_metrics
    assert result.kv_bytes == 0  # nothing happened
    assert result.peak_rss_bytes
    assert result.lost_samples == 0


def test_a_scrape_that_fails_is_in_the_timeline(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    watch = ServerWatch("http://127.0.0.1:9/metrics", None)
    watch.prepare()
    watch.start(path, RunClock())
    result = watch.finish(num_tokens=0)
    assert "ConnectError" in next(read_timeline(path)).error
    assert not result.has_metrics
    assert result.lost_samples >= 1
