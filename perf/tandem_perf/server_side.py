"""What a run cost the server: the difference of its counters and CPU times, after − before."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from tandem_perf.metrics_text import Sample, total, totals_by
from tandem_perf.processes import ProcessUsage


@dataclass(frozen=True)
class Snapshot:
    """``samples`` is empty without metrics, ``processes`` without a pid."""

    at_s: float
    samples: list[Sample]
    processes: dict[str, ProcessUsage]


class ServerSide(msgspec.Struct, frozen=True, kw_only=True):
    """Of the whole server while the run lasted; warm-up is not in it.

    ``cpu_s``, ``cpu_us_per_token``: by kind of process; per output token that the sender saw.
    ``peak_rss_bytes``: by kind; the highest sum of one sample.
    ``paths``: placements by path ("remote", "local"); ``path_shares`` add up to 1.
    ``reprefills``: requests placed again after a failure. ``preemptions``: pushed out of a batch.
    ``kv_bytes``, ``transfer_s``, ``transfers``: KV pulls: bytes, seconds, count by outcome.
    ``queue_s`` (by role), ``prefill_s`` (by path), ``decode_s``: sums over requests.
    ``prompt_tokens``, ``cached_tokens``, ``output_tokens``: as the server counted them.
    ``busy``: by worker, share of the run that its engine spent in steps.
    ``has_metrics``: False if no metric could be read, and all that needs one is 0.
    ``lost_samples``: scrapes that failed. Empty and 0 where nothing was measured.
    """

    has_metrics: bool
    cpu_s: dict[str, float]
    cpu_us_per_token: dict[str, float]
    peak_rss_bytes: dict[str, int]
    paths: dict[str, float]
    path_shares: dict[str, float]
    reprefills: float
    preemptions: float
    kv_bytes: float
    transfer_s: float
    transfers: dict[str, float]
    queue_s: dict[str, float]
    prefill_s: dict[str, float]
    decode_s: float
    prompt_tokens: float
    cached_tokens: float
    output_tokens: float
    busy: dict[str, float]
    lost_samples: int


def server_side(
    before: Snapshot,
    after: Snapshot,
    *,
    num_tokens: int,
    peak_rss_bytes: dict[str, int],
    lost_samples: int,
) -> ServerSide:
    """``num_tokens``: output tokens of the run; may be 0."""

    def grown(name: str) -> float:
        return max(0.0, total(after.samples, name) - total(before.samples, name))

    def grown_by(name: str, label: str) -> dict[str, float]:
        start = totals_by(before.samples, name, label)
        end = totals_by(after.samples, name, label)
        return {key: max(0.0, value - start.get(key, 0.0)) for key, value in end.items()}

    cpu_s = _cpu_grown(before, after)
    paths = grown_by("tandem_path_total", "path")
    placements = sum(paths.values())
    wall_s = after.at_s - before.at_s
    step_s = grown_by("tandem_step_seconds_total", "worker")
    return ServerSide(
        has_metrics=bool(before.samples and after.samples),
        cpu_s=cpu_s,
        cpu_us_per_token={k: s / num_tokens * 1e6 for k, s in cpu_s.items()} if num_tokens else {},
        peak_rss_bytes=peak_rss_bytes,
        paths=paths,
        path_shares={k: count / placements for k, count in paths.items()} if placements else {},
        reprefills=grown("tandem_reprefills_total"),
        preemptions=grown("tandem_preemptions_total"),
        kv_bytes=grown("tandem_transfer_bytes_total"),
        transfer_s=grown("tandem_transfer_seconds_sum"),
        transfers=grown_by("tandem_transfers_total", "outcome"),
        queue_s=grown_by("tandem_queue_seconds_sum", "role"),
        prefill_s=grown_by("tandem_prefill_seconds_sum", "path"),
        decode_s=grown("tandem_decode_seconds_sum"),
        prompt_tokens=grown("tandem_prompt_tokens_total"),
        cached_tokens=grown("tandem_cached_tokens_total"),
        output_tokens=grown("tandem_output_tokens_total"),
        busy={worker: spent / wall_s for worker, spent in step_s.items()} if wall_s > 0 else {},
        lost_samples=lost_samples,
    )


def _cpu_grown(before: Snapshot, after: Snapshot) -> dict[str, float]:
    nothing = ProcessUsage()
    return {
        kind: max(0.0, usage.cpu_s - before.processes.get(kind, nothing).cpu_s)
        for kind, usage in sorted(after.processes.items())
    }
