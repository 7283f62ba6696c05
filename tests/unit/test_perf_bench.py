"""``tandem bench`` as a user calls it, against a fake server."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

from tandem_cli.main import app
from tandem_perf.arrivals import PoissonArrivals
from tandem_perf.find_rate import RateSearchResult, find_rate
from tandem_perf.rate_search import RateSearch
from tandem_perf.records import read_records
from tandem_perf.run_config import RunConfig
from tandem_perf.slo import parse_slo
from tandem_perf.summary import Summary, read_summary
from tandem_perf.targets.base import TargetOptions
from test_perf_targets import FakeOpenAI


@contextmanager
def serving(server: FakeOpenAI) -> Iterator[FakeOpenAI]:
    """On an event loop of its own, as the command has one too."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    context = server.serve()
    asyncio.run_coroutine_threadsafe(context.__aenter__(), loop).result(30)
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(context.__aexit__(None, None, None), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def bench(server: FakeOpenAI, out: Path, *options: str) -> Result:
    common = ["--url", server.url, "--target", "openai", "--out", str(out), "--warmup", "1"]
    return CliRunner(env={"COLUMNS": "120"}).invoke(app, ["bench", *common, *options])


def summary_of(out: Path) -> Summary:
    return read_summary(out / "summary.json")


def test_a_run_prints_tables_and_leaves_its_files(tmp_path: Path) -> None:
    with serving(FakeOpenAI()) as server:
        result = bench(
            server, tmp_path, "--rate", "400", "--num-requests", "20", "--slo", "ttft=5,tpot=5"
        )
    assert result.exit_code == 0, result.output
    for word in ("TTFT", "ITL", "TPOT", "p99", "short", "long", "goodput", "100.0%"):
        assert word in result.output
    records = list(read_records(tmp_path / "records.jsonl"))
    assert len(records) == 20
    assert {record.length_class for record in records} == {"short", "long"}
    assert {record.prompt_tokens for record in records} == {64, 1024}
    assert {record.output_tokens for record in records} == {32}
    summary = summary_of(tmp_path)
    assert summary.statistics.overall.completed == 20
    assert summary.statistics.goodput > 0
    assert summary.slo == {"ttft": 5.0, "tpot": 5.0}
    assert summary.rate == 400
    assert summary.server_side is None
    assert summary.machine.cores >= 1
    assert [len(body["prompt"]) for body in server.bodies[1:]].count(1024) == 8


def test_two_runs_with_one_seed_send_identical_requests(tmp_path: Path) -> None:
    options = ("--num-requests", "10", "--rate", "1000", "--warmup", "0")
    bodies, digests = [], []
    for seed, folder in (("3", "a"), ("3", "b"), ("4", "c")):
        with serving(FakeOpenAI()) as server:
            bench(server, tmp_path / folder, "--seed", seed, *options)
            bodies.append(sorted(msgspec.json.encode(body) for body in server.bodies))
        digests.append(summary_of(tmp_path / folder).request_digest)
    assert bodies[0] == bodies[1] != bodies[2]
    assert digests[0] == digests[1] != digests[2]
    first, second = (
        {(record.request_id, record.scheduled_s) for record in read_records(path)}
        for path in (tmp_path / "a" / "records.jsonl", tmp_path / "b" / "records.jsonl")
    )
    assert first == second


def test_failed_requests_are_shown_and_the_exit_code_says_so(tmp_path: Path) -> None:
    with serving(FakeOpenAI(faults={number: "refuse" for number in range(100)})) as server:
        options = ("--token-ids", "1:3", "--concurrency", "2", "--num-requests", "4")
        result = bench(server, tmp_path, *options)
    assert result.exit_code == 1
    assert "HTTP 503: overloaded" in result.output
    assert "1 of 1 warm-up requests failed" in result.output
    statistics = summary_of(tmp_path).statistics
    assert statistics.errors == {"error: HTTP 503: overloaded": 4}
    assert statistics.overall.latencies.ttft.p50 is None


def test_find_rate_finds_the_rate_of_a_known_server(tmp_path: Path) -> None:
    # 20 ms a request, one at a time: beyond 50/s the queue grows, and a trial of 20 requests
    # begins to miss 200 ms at about 110/s.
    path = tmp_path / "requests.jsonl"
    path.write_text('{"input_ids": [1], "max_tokens": 1}\n' * 100)
    search = RateSearch(40.0, tolerance=0.5)
    with serving(FakeOpenAI(first_s=0.02, one_at_a_time=True)) as server:
        config = RunConfig(
            target="openai",
            target_options=TargetOptions(url=server.url),
            workload=f"jsonl:{path}",
            arrivals=PoissonArrivals(40.0),
            out_dir=tmp_path,
            slo=parse_slo("ttft=0.2"),
        )
        best = find_rate(config, search, 0.9, 0.3, Console(quiet=True))
    assert search.best is not None
    assert 2 <= search.best < 200
    assert best is not None
    assert best.rate == search.best
    result = msgspec.json.decode(
        (tmp_path / "rate_search.json").read_bytes(), type=RateSearchResult
    )
    assert result.best_rate == search.best
    for trial in result.trials:
        summary = summary_of(tmp_path / f"rate-{trial.rate:.3f}")
        assert summary.rate == trial.rate
        assert summary.statistics.overall.attainment == trial.attainment


def test_ctrl_c_keeps_what_was_recorded(tmp_path: Path) -> None:
    def interrupt() -> None:
        deadline_s = time.monotonic() + 30
        path = tmp_path / "records.jsonl"
        while time.monotonic() < deadline_s:
            if path.exists() and path.read_bytes().count(b"\n") >= 5:
                return os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)

    with serving(FakeOpenAI()) as server:
        watcher = threading.Thread(target=interrupt)
        watcher.start()
        result = bench(server, tmp_path, "--rate", "20", "--num-requests", "1000")
        watcher.join(30)
    assert "the run was stopped before its end" in result.output
    summary = summary_of(tmp_path)
    assert summary.interrupted
    assert 5 <= summary.statistics.overall.requests < 100
    assert summary.requests_prepared == 1000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workload", "nope"], "workload 'nope': one of mixed-60-40"),
        (["--slo", "ttfb=1"], "--slo 'ttfb=1'"),
        (["--rate", "1", "--concurrency", "1"], "--rate and --concurrency exclude each other"),
        (["--arrivals", "bursts"], "--arrivals bursts: poisson, constant or trace"),
        (["--arrivals", "trace"], "no arrival times"),
        (["--find-rate"], "--find-rate needs --slo"),
        (["--token-ids", "9:1"], "--token-ids 9:1"),
        (["--target", "triton-grpc"], "must begin with grpc://"),
        (["--tokenizer", "/no/such.json"], "tokenizer /no/such.json"),
    ],
)
def test_a_wrong_option_is_named(tmp_path: Path, options: list[str], message: str) -> None:
    result = bench(FakeOpenAI(url="http://127.0.0.1:9"), tmp_path, *options)
    assert result.exit_code == 1
    assert message in " ".join(result.output.split())
