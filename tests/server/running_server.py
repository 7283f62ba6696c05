"""A real server for tests: started on fresh ports, and gone without a trace afterwards."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tandem_cli.runtime_dir import SHM
from tandem_cli.server import TandemServer
from tandem_cli.server_process import session_members

_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(\{(?P<labels>.*)\})? (?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@contextmanager
def serve(
    model: str | Path, policy: str = "length", settings: Sequence[str] = (), **options: Any
) -> Iterator[TandemServer]:
    """A ready server, whose policy lets a test know the path of its prompt from the start;
    ``settings`` are KEY=VALUE or MODEL.KEY=VALUE. Fails where a trace stays.

    The log of the server is shown by pytest when the test fails.
    """
    defaults = {"http_port": 0, "grpc_port": 0, "metrics_port": 0, "log_level": "warning"}
    options = defaults | options | {"policy": policy, "settings": tuple(settings)}
    with TandemServer(model=str(model), **options) as server:
        pid, runtime_dir = server.pid, server.runtime_dir
        yield server
    assert session_members(pid) == []
    assert not runtime_dir.path.exists()
    assert list(SHM.glob(f"{runtime_dir.shm_prefix}*")) == []


def metric(server: TandemServer, name: str, **labels: str) -> float:
    """The sum of a metric's samples that have these labels; 0 where there is none."""
    return sum(
        value
        for sample, its_labels, value in scrape(server)
        if sample == name and labels.items() <= its_labels.items()
    )


def held_blocks(server: TandemServer) -> float:
    """KV blocks of all engines that some sequence or lease holds."""
    return sum(metric(server, "tandem_kv_blocks", state=state) for state in ("used", "leased"))


def scrape(server: TandemServer) -> list[tuple[str, dict[str, str], float]]:
    """Name, labels and value of every sample of /metrics."""
    # verify=False: reading the trusted certificates takes longer than the scrape.
    text = httpx.get(server.metrics_url, timeout=10, verify=False).raise_for_status().text
    found = (_SAMPLE.match(line) for line in text.splitlines() if not line.startswith("#"))
    return [
        (match["name"], dict(_LABEL.findall(match["labels"] or "")), float(match["value"]))
        for match in found
        if match
    ]


def wait_until(predicate: Callable[[], object], timeout: float = 10.0) -> None:
    """Polls until the predicate is true; metrics are published every 0.1 s."""
    deadline = time.monotonic() + timeout
    while not predicate():
        assert time.monotonic() < deadline, f"not true within {timeout} s"
        time.sleep(0.02)
