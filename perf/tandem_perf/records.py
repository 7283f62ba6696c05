"""The raw record of one request, and the JSONL file that keeps it.

``records.jsonl`` has one ``RequestRecord`` a line, in the order in which requests ended. Fields
that have their default are left out of the file. Every statistic is computed from these records.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec


class Outcome(StrEnum):
    OK = "ok"  # the final response came
    ERROR = "error"  # the target failed or refused, or the request could not be sent
    TIMEOUT = "timeout"  # no final response before the deadline
    CANCELLED = "cancelled"  # the run was stopped while it was in flight


class ServerTimings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the target itself measured; None or 0 where it does not say.

    ``path``: "remote" (a prefill worker computed the KV cache) or "local" (the decode worker).
    ``prefill_worker``, ``decode_worker``: instances, e.g. ``decode_0_0``.
    ``queue_ms``, ``prefill_ms``, ``transfer_ms``, ``decode_ms``, ``ttft_ms``: milliseconds; queue
    is the wait for a pool, transfer the pull of the KV cache.
    ``kv_bytes``: pulled. ``cached_tokens``: prompt tokens found in a prefix cache.
    ``retries``: attempts after the first (each one is a re-prefill).
    """

    path: str | None = None
    prefill_worker: str | None = None
    decode_worker: str | None = None
    queue_ms: float | None = None
    prefill_ms: float | None = None
    transfer_ms: float | None = None
    decode_ms: float | None = None
    ttft_ms: float | None = None
    cached_tokens: int = 0
    kv_bytes: int = 0
    retries: int = 0


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request as its sender saw it. Times are seconds since the start of the run (monotonic).

    ``request_id``: unique in the run and the same in every run with the same workload and seed.
    ``deployment``: name of what was measured. ``workload``: its name. ``length_class``: "short",
    "long", …; the workload defines them.
    ``scheduled_s``: when it should have been sent. Every latency counts from here, so a late
    sender or a slow server cannot hide waiting. ``sent_s``: when it was sent (None: never).
    ``first_token_s``, ``last_token_s``: arrivals (None: no token came). ``ended_s``: when the
    stream was over, by whatever outcome.
    ``token_times_s``: arrival of each output token. Tokens of one chunk have equal times.
    ``has_chunks``: True if some chunk held several tokens. Gaps are then those between chunks:
    the zeros inside a chunk are no gaps that a user sees. If the target never said how many
    tokens a chunk held, ``token_times_s`` has one time a chunk and may be shorter than
    ``output_tokens``.
    ``prompt_tokens``, ``output_tokens``: as counted by the target; else as asked and as arrived.
    ``max_tokens``: output tokens asked for.
    ``error``: message of an outcome that is not ok. ``finish_reason``: the target's, e.g. length.
    ``server``: None where the target does not give timings.
    """

    request_id: str
    deployment: str
    workload: str
    length_class: str
    scheduled_s: float
    ended_s: float
    outcome: Outcome
    sent_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    token_times_s: tuple[float, ...] = ()
    has_chunks: bool = False
    prompt_tokens: int = 0
    output_tokens: int = 0
    max_tokens: int = 0
    error: str = ""
    finish_reason: str | None = None
    server: ServerTimings | None = None

    @property
    def is_ok(self) -> bool:
        return self.outcome is Outcome.OK

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.scheduled_s

    @property
    def e2e_s(self) -> float | None:
        """Scheduled to last token."""
        return None if self.last_token_s is None else self.last_token_s - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """(last − first) / (n − 1); None with fewer than two tokens."""
        if self.first_token_s is None or self.last_token_s is None or self.output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """ITL: between successive tokens; where chunks hold several, between chunks."""
        times = self.token_times_s
        if self.has_chunks:
            times = tuple(dict.fromkeys(times))
        return [later - earlier for earlier, later in zip(times, times[1:], strict=False)]


class RecordWriter:
    """Appends records to a file, each one complete on disk once ``write`` returns."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._encoder = msgspec.json.Encoder()

    def write(self, record: msgspec.Struct) -> None:
        self._file.write(self._encoder.encode(record) + b"\n")
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()


def read_records(path: Path) -> Iterator[RequestRecord]:
    """Raises msgspec.MsgspecError for a line that is no record."""
    decoder = msgspec.json.Decoder(RequestRecord)
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                yield decoder.decode(line)
