"""One line about a finished answer: how long it is, how fast it came, which way it took."""

from __future__ import annotations

from tandem_client.assembly import Completion
from tandem_client.response import Timings


def summary_line(completion: Completion) -> str:
    """E.g. ``9 tokens · TTFT 212 ms · 18.3 tok/s · remote prefill_0_0 → decode_0_0``.

    The rate counts the tokens after the first over the decode time; what the server did not
    report is left out.
    """
    timings = completion.timings
    num_tokens = completion.num_output_tokens
    parts = [f"{num_tokens} token{'' if num_tokens == 1 else 's'}"]
    if timings.ttft_ms is not None:
        parts.append(f"TTFT {timings.ttft_ms:.0f} ms")
    if timings.decode_ms and num_tokens > 1:
        parts.append(f"{(num_tokens - 1) * 1000 / timings.decode_ms:.1f} tok/s")
    if timings.path is not None:
        parts.append(_route(timings))
    if timings.kv_bytes:
        moved = f"{_size(timings.kv_bytes)} KV"
        took = timings.transfer_ms
        moved += "" if took is None else f" in {took:.1f} ms"
        parts.append(f"{moved} by {timings.transport}" if timings.transport else moved)
    if timings.cached_tokens:
        parts.append(f"{timings.cached_tokens} cached")
    if timings.retries:
        parts.append(f"{timings.retries} retr{'y' if timings.retries == 1 else 'ies'}")
    return " · ".join(parts)


def _route(timings: Timings) -> str:
    workers = [timings.prefill_worker, timings.decode_worker]
    names = " → ".join(dict.fromkeys(worker for worker in workers if worker))
    return f"{timings.path} {names}".rstrip()


def _size(num_bytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"
