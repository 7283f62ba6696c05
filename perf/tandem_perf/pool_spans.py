"""Where and when each request was: spans of waiting, prefill, transfer and decode.

Computed from what the sender saw and the server's timings: the prefill ends when the first token
arrives and began ``prefill_ms`` earlier; all before that is waiting; the transfer follows the first
token. Network and streaming time (milliseconds) is in the phase during which it passed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from tandem_perf.records import RequestRecord

WAITING = "waiting"


class Phase(StrEnum):
    WAITING = "waiting"
    PREFILL = "prefill"
    TRANSFER = "KV transfer"
    DECODE = "decode"
    TO_FIRST_TOKEN = "waiting and prefill"  # where the server gives no timings


@dataclass(frozen=True)
class Span:
    """``lane``: requests that are in a pool at the same time have different ones, from 0."""

    phase: Phase
    length_class: str
    start_s: float
    end_s: float
    lane: int = 0


@dataclass(frozen=True)
class PoolSpans:
    """Of one worker, or of all that wait for one."""

    name: str
    spans: tuple[Span, ...]

    @property
    def num_lanes(self) -> int:
        return 1 + max(span.lane for span in self.spans)


def pool_spans(records: Iterable[RequestRecord]) -> list[PoolSpans]:
    """Waiting first, then workers by name; requests without a first token are left out."""
    stays: dict[str, list[list[Span]]] = {}
    for record in records:
        for name, spans in _stays(record).items():
            stays.setdefault(name, []).append(spans)
    names = sorted(stays, key=lambda name: (name != WAITING, not name.startswith("prefill"), name))
    return [PoolSpans(name, tuple(_in_lanes(stays[name]))) for name in names]


def _stays(record: RequestRecord) -> dict[str, list[Span]]:
    """By pool: the spans of one request, one after the other."""
    first_s, last_s = record.first_token_s, record.last_token_s
    if first_s is None or last_s is None:
        return {}
    start_s = record.scheduled_s

    def span(phase: Phase, begin_s: float, end_s: float) -> Span:
        return Span(phase, record.length_class, begin_s, end_s)

    server = record.server
    if server is None or server.prefill_ms is None or not server.decode_worker:
        return {
            "server": [span(Phase.TO_FIRST_TOKEN, start_s, first_s),
                       span(Phase.DECODE, first_s, last_s)]
        }  # fmt: skip
    prefill_s = max(start_s, first_s - server.prefill_ms / 1e3)
    stays = {WAITING: [span(Phase.WAITING, start_s, prefill_s)]}
    prefill_at = server.prefill_worker or server.decode_worker
    stays[prefill_at] = [span(Phase.PREFILL, prefill_s, first_s)]
    decode = [span(Phase.DECODE, first_s, last_s)]
    if server.transfer_ms:
        moved_s = min(last_s, first_s + server.transfer_ms / 1e3)
        decode = [span(Phase.TRANSFER, first_s, moved_s), span(Phase.DECODE, moved_s, last_s)]
    stays[server.decode_worker] = [*stays.get(server.decode_worker, []), *decode]
    return stays


def _in_lanes(stays: Sequence[list[Span]]) -> list[Span]:
    """Each stay in the lowest lane that is free for all of it."""
    free_from_s: list[float] = []
    placed: list[Span] = []
    for spans in sorted(stays, key=lambda spans: spans[0].start_s):
        start_s, end_s = spans[0].start_s, spans[-1].end_s
        lane = next((n for n, free_s in enumerate(free_from_s) if free_s <= start_s), None)
        if lane is None:
            lane = len(free_from_s)
            free_from_s.append(end_s)
        free_from_s[lane] = end_s
        placed += [replace(span, lane=lane) for span in spans]
    return placed
