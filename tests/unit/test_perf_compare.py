"""``tandem bench compare``: figures by hand, rounds against fake deployments, real processes."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tandem.types import Policy
from tandem_cli.errors import CliError
from tandem_cli.main import app
from tandem_cli.overrides import overrides_of, parse_override
from tandem_perf.arrivals import ClosedLoop, PoissonArrivals
from tandem_perf.calibration import Budget, Calibration, num_requests_for, rate_for
from tandem_perf.compare import has_failed, run_comparison
from tandem_perf.comparison import Spread, Verdict, comparison_rows, spread
from tandem_perf.comparison_result import COMPARISON, ComparisonResult
from tandem_perf.comparison_run import ComparisonPlan
from tandem_perf.deployments import COLOCATED, REPLICAS, Endpoint, built_in, on_cores
from tandem_perf.external_server import ExternalDeployment, HealthyCommand, read_deployments
from tandem_perf.process_group import Command, ProcessGroup, core_set
from tandem_perf.records import read_records
from tandem_perf.run_config import RunConfig
from tandem_perf.summary import Summary
from tandem_perf.targets.base import TargetOptions
from tandem_perf.targets.registry import open_target
from test_perf_bench import serving
from test_perf_report import synthetic_records, synthetic_summary
from test_perf_targets import REQUEST, FakeOpenAI


def summaries(deployment: str, *tokens_per_s: float) -> dict[int, Summary]:
    base = synthetic_summary(deployment, synthetic_records(deployment, 1)[:5])
    return {
        number: msgspec.structs.replace(
            base,
            statistics=msgspec.structs.replace(base.statistics, output_tokens_per_s=value),
        )
        for number, value in enumerate(tokens_per_s, 1)
    }


def tokens_row(**runs: dict[int, Summary]) -> tuple[dict[str, Spread | None], ...]:
    (row,) = [row for row in comparison_rows(runs) if row.metric == "output tokens"]
    return row.values, row.ratios


def test_values_are_medians_over_rounds_with_their_range() -> None:
    values, _ = tokens_row(a=summaries("a", 10, 30, 20), b=summaries("b", 5))
    assert values == {"a": Spread(20, 10, 30, 3), "b": Spread(5, 5, 5, 1)}


def test_ratios_are_within_a_round() -> None:
    # The second round was twice as fast for both: that must not show in the ratio.
    _, ratios = tokens_row(a=summaries("a", 10, 20), b=summaries("b", 15, 30))
    assert ratios["b"] == Spread(1.5, 1.5, 1.5, 2)
    # A round that one of them has not is in no ratio.
    _, ratios = tokens_row(a=summaries("a", 10), b=summaries("b", 20, 1000))
    assert ratios["b"] == Spread(2, 2, 2, 1)


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        ((10, 10), (11, 12), Verdict.BETTER),
        ((10, 10), (9, 8), Verdict.WORSE),
        ((10, 10), (9, 11), Verdict.UNCLEAR),
        ((10,), (20,), Verdict.UNCLEAR),
    ],
)
def test_a_difference_counts_if_every_round_agrees(
    first: tuple[float, ...], second: tuple[float, ...], verdict: Verdict
) -> None:
    rows = comparison_rows({"a": summaries("a", *first), "b": summaries("b", *second)})
    (row,) = [row for row in rows if row.metric == "output tokens"]
    assert row.verdict("b") is verdict


def test_lower_latency_is_better() -> None:
    fast = {n: synthetic_summary("b", synthetic_records("tandem-disaggregated", 1)) for n in (1, 2)}
    slow = {n: synthetic_summary("a", synthetic_records("tandem-colocated", 1)) for n in (1, 2)}
    rows = comparison_rows({"a": slow, "b": fast})
    verdicts = {(row.section, row.metric): row.verdict("b") for row in rows}
    assert verdicts["all requests", "ITL p99"] is Verdict.BETTER
    sections = list(dict.fromkeys(row.section for row in rows))
    assert sections == ["throughput", "all requests", "short prompts", "long prompts", "cost"]


def test_nothing_measured_is_nothing_not_zero() -> None:
    assert spread([None, None]) is None
    assert all("CPU" not in row.metric for row in comparison_rows({"a": {}, "b": {}}))


CALIBRATION = Calibration(start_s=10, requests_per_s=2, latency_s=5)


def test_a_budget_is_shared_by_all_runs_and_starts() -> None:
    # 300 − 12 report − 3 starts of 10 − 4 · (4 stop + 2 warm-up) = 234 s: 58.5 s a run; 85 % of it.
    budget = Budget(left_s=300, num_visits=4, warm_up=4)
    assert num_requests_for(ClosedLoop(8), budget, CALIBRATION) == 95
    # Open loop at 1/s: the last request still takes 5 s.
    assert num_requests_for(PoissonArrivals(1.0), budget, CALIBRATION) == 40
    assert num_requests_for(ClosedLoop(8), replace(budget, left_s=1), CALIBRATION) == 10
    assert rate_for(0.7, replace(CALIBRATION, requests_per_s=0.8123)) == 0.57


@dataclass
class FakeDeployment:
    """A server that says when it is up; ``fault``: it does not start."""

    name: str
    server: FakeOpenAI
    log: list[str]
    fault: str = ""
    up: list[str] = field(default_factory=list)

    @contextmanager
    def running(self, log: Path) -> Iterator[Endpoint]:
        if self.fault:
            raise CliError(self.fault)
        self.log.append(f"{self.name} up")
        yield Endpoint(target="openai", url=self.server.url, facts={"kind": "fake"})
        self.log.append(f"{self.name} down")


def plan_of(tmp_path: Path, *deployments: FakeDeployment, **options: object) -> ComparisonPlan:
    load = RunConfig(
        target="", target_options=TargetOptions(url=""), workload="mixed-60-40",
        arrivals=ClosedLoop(4), out_dir=tmp_path, num_requests=10, warm_up=1,
    )  # fmt: skip
    return replace(
        ComparisonPlan(deployments=deployments, rounds=2, load=load), **options  # type: ignore[arg-type]
    )


def compare(plan: ComparisonPlan) -> tuple[ComparisonResult, str]:
    console = Console(width=140, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    return run_comparison(plan, console, with_report=False), console.export_text()


def test_deployments_take_turns_with_the_same_requests(tmp_path: Path) -> None:
    log: list[str] = []
    with serving(FakeOpenAI()) as fast, serving(FakeOpenAI(first_s=0.2)) as slow:
        result, output = compare(
            plan_of(tmp_path, FakeDeployment("fast", fast, log), FakeDeployment("slow", slow, log))
        )
        assert sorted(map(msgspec.json.encode, fast.bodies)) == sorted(
            map(msgspec.json.encode, slow.bodies)
        )
    visits = ["fast up", "fast down", "slow up", "slow down"]
    assert log == visits * 2
    assert not has_failed(result)
    (ttft,) = [r for r in result.rows if (r.section, r.metric) == ("all requests", "TTFT p50")]
    assert ttft.verdict("slow") is Verdict.WORSE
    assert "slow" in output and "▼" in output
    for number in (1, 2):
        records = list(read_records(tmp_path / f"runs/slow/round-{number}/records.jsonl"))
        assert len(records) == 10
    kept = msgspec.json.decode((tmp_path / COMPARISON).read_bytes(), type=ComparisonResult)
    assert kept.rows == result.rows


def test_a_deployment_that_fails_is_reported_not_averaged(tmp_path: Path) -> None:
    faulty = FakeOpenAI(faults={number: "refuse" for number in range(50_000)})
    with serving(FakeOpenAI()) as good, serving(faulty) as bad:
        result, output = compare(
            plan_of(
                tmp_path, FakeDeployment("good", good, []), FakeDeployment("bad", bad, []),
                FakeDeployment("dead", good, [], fault="no such program"), rounds=1,
            )
        )  # fmt: skip
    assert has_failed(result)
    assert {(f.deployment, f.message) for f in result.faults} == {
        ("bad", "error: HTTP 503: overloaded"), ("dead", "no such program"),
    }  # fmt: skip
    assert all(row.values["bad"] is None and row.values["dead"] is None for row in result.rows)
    assert "no such program" in output


def test_sigterm_while_a_server_starts_keeps_what_was_measured(tmp_path: Path) -> None:
    class Terminated(FakeDeployment):
        @contextmanager
        def running(self, log: Path) -> Iterator[Endpoint]:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
            yield Endpoint(target="openai", url="never")

    before = signal.getsignal(signal.SIGTERM)
    try:
        with serving(FakeOpenAI()) as server:
            good, late = FakeDeployment("good", server, []), Terminated("late", server, [])
            result, output = compare(plan_of(tmp_path, good, late))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert result.interrupted and has_failed(result)
    assert "stopped before its end" in output
    assert any(row.values["good"] for row in result.rows)
    assert not any(row.values["late"] for row in result.rows)


def test_a_calibration_chooses_rate_and_requests(tmp_path: Path) -> None:
    with serving(FakeOpenAI(first_s=0.02)) as server:
        plan = plan_of(tmp_path, FakeDeployment("one", server, []), load_share=0.5, rounds=1)
        result, output = compare(plan)
    assert "calibration: ready after" in output
    assert not has_failed(result)
    (summary,) = tmp_path.glob("runs/one/round-1/summary.json")
    assert msgspec.json.decode(summary.read_bytes(), type=Summary).rate is not None


SERVER = """
import http.server, pathlib, signal, subprocess, sys, tempfile
port, marker = int(sys.argv[1]), pathlib.Path(sys.argv[2])
marker.with_suffix(".forgotten").write_text(tempfile.mkstemp()[1])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
def stop(number, frame):
    cleaner = "sleep 0.3; echo %s > %s" % (signal.Signals(number).name, marker)
    subprocess.Popen(["sh", "-c", cleaner], stdout=subprocess.DEVNULL); sys.exit(0)
signal.signal(signal.SIGINT, stop); signal.signal(signal.SIGTERM, stop)
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def server_command(tmp_path: Path, name: str) -> HealthyCommand:
    script, port = tmp_path / "server.py", free_port()
    script.write_text(SERVER)
    return HealthyCommand(
        command=f"{sys.executable} {script} {port} {tmp_path / name}",
        health_url=f"http://127.0.0.1:{port}/health",
    )


def test_an_external_server_is_up_inside_the_block_only(tmp_path: Path) -> None:
    commands = tuple(server_command(tmp_path, name) for name in ("a", "b"))
    urls = tuple(command.health_url.removesuffix("/health") for command in commands)
    deployment = ExternalDeployment(
        name="pair", urls=urls, processes=commands, stop_signal="SIGINT",
        after_start=f"echo $SERVER_PID > {tmp_path}/pid",
    )  # fmt: skip
    with deployment.running(tmp_path / "log") as endpoint:
        assert endpoint.target == "openai-round-robin"
        assert endpoint.url == ",".join(urls)
        assert (tmp_path / "pid").read_text().strip() == str(endpoint.pid)
        assert all(httpx.get(url).status_code == 200 for url in urls)
        forgotten = [Path((tmp_path / f"{name}.forgotten").read_text()) for name in ("a", "b")]
        assert all(path.exists() for path in forgotten)
    assert not any(path.parent.exists() for path in forgotten)
    for url in urls:
        with pytest.raises(httpx.ConnectError):
            httpx.get(url)
    # Written by processes that outlive the servers for a while.
    assert [(tmp_path / name).read_text() for name in ("a", "b")] == ["SIGINT\n", "SIGINT\n"]


def test_a_server_that_ends_early_is_shown_with_its_log(tmp_path: Path) -> None:
    command = HealthyCommand(command="sh -c 'echo out of memory; exit 3'", health_url="http://x:1")
    deployment = ExternalDeployment(name="gone", urls=("http://x:1",), processes=(command,))
    with pytest.raises(CliError, match=r"gone: ended before it was healthy:\s+out of memory"):
        with deployment.running(tmp_path / "log"):
            pass
    assert "out of memory" in (tmp_path / "log").read_text()


def test_a_server_that_is_never_healthy_is_stopped(tmp_path: Path) -> None:
    command = HealthyCommand(command="sleep 60", health_url=f"http://127.0.0.1:{free_port()}/")
    deployment = ExternalDeployment(
        name="mute", urls=("http://x:1",), processes=(command,), start_timeout_s=0.3
    )
    started_s = time.monotonic()
    with pytest.raises(CliError, match="mute: .* not healthy after 0.3 s"):
        with deployment.running(tmp_path / "log"):
            pass
    assert time.monotonic() - started_s < 30


def test_cores() -> None:
    assert core_set("0-2,5") == {0, 1, 2, 5}
    assert core_set("") == frozenset()
    with pytest.raises(ValueError, match="write them like"):
        core_set("a")
    with pytest.raises(ValueError, match="stop_signal 'STOP'"):
        ProcessGroup((Command(command="x"),), "STOP")
    before = os.sched_getaffinity(0)
    with on_cores(frozenset({min(before)})):
        assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before


def test_replicas_have_a_core_each() -> None:
    deployment = built_in(REPLICAS, Policy.AUTO, (), num_cores=3)
    assert (deployment.policy, deployment.decode_instances) == (Policy.NEVER, 3)


def test_the_baseline_prefills_in_whole_chunks_unless_told_otherwise() -> None:
    settings = ("max_itl_ms=200", "decode.max_num_seqs=8")
    deployment = built_in(COLOCATED, Policy.AUTO, settings, num_cores=2)
    overrides = [parse_override(text) for text in deployment.settings]
    assert overrides_of(overrides, "decode") == {"max_itl_ms": "200", "max_num_seqs": "8"}
    assert built_in(COLOCATED, Policy.AUTO, (), num_cores=2).settings == ("max_itl_ms=0",)


def test_examples_can_be_read() -> None:
    folder = Path(__file__).parents[2] / "perf" / "examples"
    environ = {"VLLM_PYTHON": "/venv/bin/python", "MODEL": "/model"}
    names = [d.name for d in read_deployments(folder / "vllm-cpu.toml", environ)]
    assert names == ["vllm", "vllm-replicas", "vllm-disaggregated"]
    assert len(read_deployments(folder / "tandem-settings.toml")) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[deployment]]\nkind = "tandem"\nnam = "x"', "nam"),
        ('[[deployment]]\nkind = "other"\nname = "x"', "other"),
        ('[[deployment]]\nkind = "tandem"\nname = "${NOPE}"', "set NOPE"),
        ('[[deployment]]\nkind = "external"\nname = "x"\nurls = []\nprocesses = []', "needs urls"),
        ("[[deployment", "f.toml"),
    ],
)
def test_faults_of_a_file_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "f.toml"
    path.write_text(text)
    with pytest.raises(CliError, match=message):
        read_deployments(path, {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--deployment", "nope"], "--deployment nope: one of tandem-disaggregated"),
        (["--load", "0.5", "--rate", "1"], "--load excludes"),
        (["--time-budget", "60", "--num-requests", "5"], "--time-budget excludes"),
        (["--sweep", "1,x"], "--sweep 1,x"),
        (["--cores", "9999"], "--cores 9999"),
        (["--deployments", "/nope.toml"], "/nope.toml: No such file"),
    ],
)
def test_bad_options_are_one_message(options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "compare", *options])
    assert result.exit_code == 1
    assert f"error: {message}" in result.output


async def test_round_robin_takes_turns() -> None:
    async with FakeOpenAI().serve() as first, FakeOpenAI().serve() as second:
        urls = TargetOptions(url=f"{first.url},{second.url}")
        target = open_target("openai-round-robin", urls)
        for _ in range(4):
            await target.send(REQUEST, lambda num_tokens: None)
        await target.aclose()
    assert (len(first.bodies), len(second.bodies)) == (2, 2)
