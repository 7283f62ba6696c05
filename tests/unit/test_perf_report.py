"""The report of synthetic results: every section, no foreign resources, nothing unescaped."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from tandem_cli.errors import CliError
from tandem_perf.comparison import comparison_rows
from tandem_perf.comparison_result import COMPARISON, ComparisonResult, Fault
from tandem_perf.machine import Machine
from tandem_perf.pool_spans import WAITING, Phase, pool_spans
from tandem_perf.provenance import Provenance
from tandem_perf.records import Outcome, RecordWriter, RequestRecord, ServerTimings
from tandem_perf.report import write_report
from tandem_perf.run import RECORDS, SUMMARY, TIMELINE
from tandem_perf.server_side import ServerSide
from tandem_perf.slo import Slo
from tandem_perf.statistics import statistics_of
from tandem_perf.summary import Summary, write_json
from tandem_perf.timeline import TimelineRow, WorkerState

SLO = Slo({"ttft": 2.0, "tpot": 0.15})
HOSTILE = "</script><img src=x onerror=alert(1)> & \"quotes\""
MACHINE = Machine(
    cpu="Test CPU", cores=2, memory_bytes=8 * 2**30, system="Linux", python="3.11.7",
    load_average=(0.1, 0.2, 0.3), versions={"torch": "2.13.0"},
)  # fmt: skip


def synthetic_records(deployment: str, seed: int, rate: float = 0.5) -> list[RequestRecord]:
    """Colocated: prefills of long prompts stretch the gaps of everybody."""
    rng = random.Random(seed)
    is_split = deployment == "tandem-disaggregated"
    records, at_s, free_s = [], 0.0, 0.0
    for number in range(40):
        at_s += rng.expovariate(rate)
        length_class = "long" if rng.random() < 0.4 else "short"
        prefill_s = (3.2 if is_split else 2.0) if length_class == "long" else 0.25
        start_s = max(at_s, free_s)
        first_s = free_s = start_s + prefill_s * rng.uniform(0.9, 1.1)
        times = [first_s]
        for _ in range(31):
            stall_s = 0.9 if not is_split and rng.random() < 0.08 else 0.0
            times.append(times[-1] + rng.uniform(0.06, 0.09) + stall_s)
        path = "remote" if is_split and length_class == "long" else "local"
        prefill_worker = "prefill_0_0" if path == "remote" else "decode_0_0"
        records.append(
            RequestRecord(
                request_id=str(number), deployment=deployment, workload="mixed-60-40",
                length_class=length_class, scheduled_s=at_s, sent_s=at_s, ended_s=times[-1],
                outcome=Outcome.OK, first_token_s=first_s, last_token_s=times[-1],
                token_times_s=tuple(times),
                prompt_tokens=64 if length_class == "short" else 1024,
                output_tokens=32, max_tokens=32,
                server=ServerTimings(
                    path=path, prefill_worker=prefill_worker, decode_worker="decode_0_0",
                    queue_ms=(start_s - at_s) * 1e3, prefill_ms=(first_s - start_s) * 1e3,
                    transfer_ms=12.0 if path == "remote" else 0.0,
                ),
            )
        )  # fmt: skip
    return records


def synthetic_timeline(deployment: str) -> list[TimelineRow]:
    def state(worker: str, role: str, at_s: float) -> WorkerState:
        used = (at_s * 3) % 40
        return WorkerState(
            worker=worker, role=role, running=at_s % 5, waiting=at_s % 3, up=1,
            kv_blocks={"free": 100 - used, "used": used, "cached": 0, "leased": 0},
        )  # fmt: skip

    workers = [("decode_0_0", "decode")]
    if deployment == "tandem-disaggregated":
        workers.insert(0, ("prefill_0_0", "prefill"))
    return [
        TimelineRow(at_s=n / 2, workers=tuple(state(*worker, n / 2) for worker in workers))
        for n in range(160)
    ]


def synthetic_summary(
    deployment: str, records: list[RequestRecord], rate: float = 0.5, started: int = 0
) -> Summary:
    is_split = deployment == "tandem-disaggregated"
    costs = {"engine of stub decode": 40_000.0 if is_split else 80_000.0, "tritonserver": 300.0}
    if is_split:
        costs["engine of stub prefill"] = 45_000.0
    return Summary(
        deployment=deployment, workload="mixed-60-40", target="triton-grpc", url="grpc://x:1",
        arrivals=f"poisson {rate:g}/s", rate=rate, concurrency=None, seed=0,
        request_digest="0123456789abcdef", requests_prepared=40, slo=SLO.limits_s,
        started_at=f"2026-01-01T00:00:{started:02}+00:00", interrupted=False, warm_up=4,
        warm_up_failed=0, statistics=statistics_of(records, SLO), machine=MACHINE,
        server_side=ServerSide(
            has_metrics=True, cpu_s={}, cpu_us_per_token=costs, peak_rss_bytes={"all": 10**9},
            paths={}, path_shares={}, reprefills=0, preemptions=0, kv_bytes=0, transfer_s=0,
            transfers={}, queue_s={}, prefill_s={}, decode_s=0, prompt_tokens=0, cached_tokens=0,
            output_tokens=0, busy={}, lost_samples=0,
        ),
    )  # fmt: skip


def write_run(folder: Path, summary: Summary, records: list[RequestRecord]) -> None:
    folder.mkdir(parents=True)
    write_json(folder / SUMMARY, summary)
    with RecordWriter(folder / RECORDS) as writer:
        for record in records:
            writer.write(record)
    with RecordWriter(folder / TIMELINE) as writer:
        for row in synthetic_timeline(summary.deployment):
            writer.write(row)


def write_comparison(
    folder: Path,
    deployments: tuple[str, ...] = ("tandem-colocated", "tandem-disaggregated"),
    sweep: tuple[float, ...] = (0.25, 1.0),
    fault: str = "",
) -> None:
    runs: dict[str, dict[int, Summary]] = {name: {} for name in deployments}
    started = 0
    for number in (1, 2):
        for name in deployments:
            records = synthetic_records(name, number)
            runs[name][number] = synthetic_summary(name, records, started=started)
            started += 1
            write_run(folder / "runs" / name / f"round-{number}", runs[name][number], records)
    for name in deployments:
        for rate in sweep:
            records = synthetic_records(name, 9, rate)
            summary = synthetic_summary(name, records, rate, 50)
            write_run(folder / "runs" / name / f"rate-{rate:.3f}", summary, records)
    faults = [Fault(deployment="broken", round=1, message=fault)] if fault else []
    result = ComparisonResult(
        deployments=deployments, rounds=2, facts={deployments[0]: {"settings": HOSTILE}},
        faults=tuple(faults), interrupted=False, rows=comparison_rows(runs),
        provenance=Provenance(
            command="tandem bench compare", commit="abc123", cpu_flags=("avx2",),
            cores_of_servers="all", load_before=3.2,
        ),
    )  # fmt: skip
    write_json(folder / COMPARISON, result)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("comparison")
    write_comparison(path, fault=HOSTILE)
    write_report(path)
    return path


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    return (folder / "report.html").read_text()


def test_every_section_is_there(page: str) -> None:
    titles = re.findall(r"<h2>(.*?)</h2>", page)
    assert titles == [
        "Comparison", "Latency", "Length classes", "Goodput against rate", "Timeline of the pools",
        "Queue and KV occupancy", "Where the time goes", "Errors", "Method", "Machine and versions",
    ]  # fmt: skip
    for anchor in re.findall(r'<a href="#(\w+)"', page):
        assert f'<section id="{anchor}"' in page


def test_every_chart_is_inline_and_a_png(folder: Path, page: str) -> None:
    names = {path.stem for path in folder.glob("*.png")}
    assert names == {
        "latency-cdf", "latency-cdf-by-class", "goodput-by-rate", "occupancy", "where-time-goes",
        "pools-tandem-colocated", "pools-tandem-disaggregated",
    }  # fmt: skip
    assert page.count("<svg ") == page.count("</svg>") == len(names)
    assert all((folder / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in names)


def test_nothing_is_loaded_from_elsewhere(page: str) -> None:
    assert re.findall(r"""(?:src|href)\s*=\s*["'](?!#)[^"']*["']""", page) == []
    assert re.findall(r"url\((?!#)", page) == []
    assert "@import" not in page
    assert "<script" not in page
    assert "<link" not in page


def test_ids_are_unique(page: str) -> None:
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_texts_are_escaped(page: str) -> None:
    assert "<img" not in page
    assert page.count("&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt; &amp;") == 3


def test_figures_of_the_runs_are_in_the_tables(page: str) -> None:
    for fact in ("Test CPU", "abc123", "0123456789abcdef", "torch 2.13.0", "avx2", "ttft ≤ 2 s"):
        assert fact in page
    assert "broken, round 1, was not measured" in page
    assert "This machine was busy with something else (load average 3.2 a core" in page


def test_a_single_run_has_a_report_too(tmp_path: Path) -> None:
    records = [r for r in synthetic_records("one", 1) if r.length_class == "short"]
    write_run(tmp_path / "run", synthetic_summary("one", records), records)
    (tmp_path / "run" / TIMELINE).unlink()
    page = write_report(tmp_path / "run").read_text()
    assert "<h1>one</h1>" in page
    assert "No sweep of rates was recorded" in page
    assert f"all {len(records)} requests of all runs were answered" in page
    assert "No server gave metrics" in page


def test_a_folder_without_results_is_a_message(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="no results of a run"):
        write_report(tmp_path)


def record(
    scheduled_s: float, first_s: float, last_s: float, server: ServerTimings | None
) -> RequestRecord:
    return RequestRecord(
        request_id="0", deployment="d", workload="w", length_class="long", outcome=Outcome.OK,
        scheduled_s=scheduled_s, first_token_s=first_s, last_token_s=last_s, ended_s=last_s,
        server=server,
    )  # fmt: skip


def test_a_remote_request_waits_is_prefilled_moved_and_decoded() -> None:
    server = ServerTimings(
        prefill_worker="prefill_0_0", decode_worker="decode_0_0", prefill_ms=2000, transfer_ms=500
    )
    waiting, prefill, decode = pool_spans([record(1, 4, 9, server)])
    assert [pool.name for pool in (waiting, prefill, decode)] == [
        WAITING, "prefill_0_0", "decode_0_0",
    ]  # fmt: skip
    spans = [span for pool in (waiting, prefill, decode) for span in pool.spans]
    assert [(span.phase, span.start_s, span.end_s) for span in spans] == [
        (Phase.WAITING, 1, 2), (Phase.PREFILL, 2, 4), (Phase.TRANSFER, 4, 4.5),
        (Phase.DECODE, 4.5, 9),
    ]  # fmt: skip


def test_requests_at_the_same_time_have_different_lanes() -> None:
    pools = pool_spans([record(0, 1, 5, None), record(1, 2, 4, None), record(5, 6, 7, None)])
    (server,) = pools
    lanes = [span.lane for span in server.spans if span.phase is Phase.DECODE]
    assert lanes == [0, 1, 0]
    assert server.num_lanes == 2


def test_a_request_without_a_token_is_in_no_pool() -> None:
    failed = RequestRecord(
        request_id="0", deployment="d", workload="w", length_class="long", scheduled_s=0,
        ended_s=1, outcome=Outcome.ERROR, error="x",
    )  # fmt: skip
    assert pool_spans([failed]) == []
