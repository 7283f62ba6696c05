"""The ecosystem's load tools against the real server: requests succeed, TTFT and ITL come out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from tandem_cli.server import TandemServer
from tandem_perf.perf_analyzer_export import read_export

PERF = Path(__file__).parents[2] / "perf"
TIMEOUT_S = 120.0
NUM_REQUESTS, NUM_TOKENS = 8, 6


def test_perf_analyzer_and_the_figures_of_its_export(
    tiny_server: TandemServer, tmp_path: Path
) -> None:
    for attempt in ("first", "second"):  # seen once: perf_analyzer left half of its export
        folder = tmp_path / attempt
        folder.mkdir()
        options = ("-c", "2", "-n", str(NUM_REQUESTS), "-t", str(NUM_TOKENS), "-o", str(folder))
        done = subprocess.run(
            [PERF / "perf_analyzer.sh", "-u", tiny_server.grpc_address, *options],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env=os.environ | {"PYTHON": sys.executable},
        )
        if "data was truncated" not in done.stderr:
            break
    assert done.returncode == 0, done.stdout + done.stderr
    assert "TTFT" in done.stdout and "ITL" in done.stdout
    (summary,) = read_export(folder / "export.json")
    assert summary.load == "concurrency 2"
    assert summary.requests >= NUM_REQUESTS and summary.without_tokens == 0
    assert summary.itl.count == summary.requests * (NUM_TOKENS - 1), "a response for each token"
    assert summary.ttft.p50 is not None and summary.ttft.p50 > 0
    assert summary.itl.p50 is not None and summary.itl.p50 > 0
    sent = msgspec.json.decode((folder / "input.json").read_bytes())["data"]
    assert len(sent) == len((PERF / "prompts.txt").read_text().splitlines())


def locust(*options: str) -> dict[tuple[str, str], dict[str, Any]]:
    """The rows of its statistics by (type, name). Users finish their last requests."""
    command = [
        *(sys.executable, "-m", "locust", "-f", str(PERF / "locustfile.py"), "--headless"),
        *("-t", "3s", "--stop-timeout", "60", "--json", *options),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    rows = {(row["method"], row["name"]): row for row in json.loads(done.stdout)}
    has_failures = any(row["num_failures"] for row in rows.values())
    assert done.returncode == int(has_failures), done.stdout + done.stderr
    return rows


def test_locust_over_grpc_and_server_sent_events(tiny_server: TandemServer) -> None:
    rows = locust(
        *("-u", "2", "-r", "2", "--max-tokens", str(NUM_TOKENS)),
        *("--host", tiny_server.http_url, "--grpc-address", tiny_server.grpc_address),
    )
    for protocol in ("grpc", "sse"):
        counts = {name: rows[protocol, name]["num_requests"] for name in ("request", "ttft", "itl")}
        assert counts["request"] >= 1
        assert counts["ttft"] == counts["request"]
        assert counts["itl"] == counts["request"] * (NUM_TOKENS - 1), "a chunk for each token"
        assert not any(rows[protocol, name]["num_failures"] for name in counts)
        assert rows[protocol, "ttft"]["total_response_time"] > 0


def test_locust_counts_what_fails(tiny_server: TandemServer) -> None:
    """A server that refuses: locust says so and shows no TTFT for it."""
    rows = locust(
        *("-u", "1", "--max-tokens", "0", "--grpc-address", tiny_server.grpc_address, "GrpcUser"),
    )
    refused = rows["grpc", "request"]
    assert refused["num_failures"] == refused["num_requests"] > 0
    assert {name for _, name in rows} == {"request"}
