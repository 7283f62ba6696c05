"""The state of a server over time: ``timeline.jsonl`` has one ``TimelineRow`` a line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from tandem_perf.metrics_text import Sample
from tandem_perf.processes import ProcessUsage

_GAUGES = {
    "tandem_running": "running",
    "tandem_waiting": "waiting",
    "tandem_waiting_tokens": "waiting_tokens",
    "tandem_kv_leases": "kv_leases",
    "tandem_engine_up": "up",
    "tandem_step_seconds_total": "step_s",
    "tandem_computed_tokens_total": "computed_tokens",
}


class WorkerState(msgspec.Struct, frozen=True, kw_only=True):
    """One engine. ``running``, ``waiting``: sequences; ``waiting_tokens``: prompt tokens not
    computed yet; ``kv_blocks``: by state (free, cached, leased, used); ``kv_leases``: prefills
    that wait for their puller; ``up``: 1 while it takes sequences. ``step_s`` and
    ``computed_tokens`` are totals since the engine's model was loaded: the increase of ``step_s``
    over time is how busy it was.
    """

    worker: str
    role: str
    running: float = 0
    waiting: float = 0
    waiting_tokens: float = 0
    kv_leases: float = 0
    up: float = 0
    step_s: float = 0
    computed_tokens: float = 0
    kv_blocks: dict[str, float] = {}


class TimelineRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``at_s``: seconds since the start of the run, like those of records. ``requests_live``:
    accepted and not finished, in all orchestrators. ``processes``: by kind, CPU time in total.
    ``error``: why there is no metric in this row.
    """

    at_s: float
    requests_live: float = 0
    workers: tuple[WorkerState, ...] = ()
    processes: dict[str, ProcessUsage] = {}
    error: str = ""


def worker_states(samples: list[Sample]) -> tuple[WorkerState, ...]:
    """By worker name; empty for a server that is not Tandem's."""
    fields: dict[tuple[str, str], dict[str, float]] = {}
    blocks: dict[tuple[str, str], dict[str, float]] = {}
    for sample in samples:
        key = (sample.labels.get("worker", ""), sample.labels.get("role", ""))
        if not key[0]:
            continue
        if sample.name == "tandem_kv_blocks":
            blocks.setdefault(key, {})[sample.labels.get("state", "")] = sample.value
        elif sample.name in _GAUGES:
            fields.setdefault(key, {})[_GAUGES[sample.name]] = sample.value
    return tuple(
        msgspec.convert(
            {**fields.get(key, {}), "worker": key[0], "role": key[1],
             "kv_blocks": blocks.get(key, {})},
            WorkerState,
        )
        for key in sorted(fields.keys() | blocks.keys())
    )  # fmt: skip


def read_timeline(path: Path) -> Iterator[TimelineRow]:
    decoder = msgspec.json.Decoder(TimelineRow)
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                yield decoder.decode(line)
