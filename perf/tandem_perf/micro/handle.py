"""µs to sign and to verify a KV handle, beside the HMAC of the same bytes."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import sha256

from tandem import wire
from tandem.kv.handle import VERSION, KVHandle, sign, verify
from tandem_perf.micro.figure import Bound, Figure, MicroOptions, time_figure
from tandem_perf.micro.timing import time_repeats

NUM_BLOCK_IDS = (16, 1024)
_SECRET = bytes(32)
_LOOPS = 500


def run(options: MicroOptions) -> Iterator[Figure]:
    return measure(options, _LOOPS)


def measure(options: MicroOptions, loops: int) -> Iterator[Figure]:
    for num_blocks in NUM_BLOCK_IDS:
        handle = _handle(num_blocks)
        payload, blob = wire.encode(handle), sign(handle, _SECRET)
        digest = time_repeats(
            partial(hmac.digest, _SECRET, payload, sha256), options.repeats, loops=loops
        )
        bound = Bound(value=digest.best_cpu_s * 1e6, reason=f"HMAC-SHA256 of {len(payload)} B")
        actions: dict[str, Callable[[], object]] = {
            "sign": partial(sign, handle, _SECRET),
            "verify": partial(verify, blob, _SECRET, now_unix_s=0.0),
        }
        for name, action in actions.items():
            timing = time_repeats(action, options.repeats, loops=loops)
            what = f"{name}, {num_blocks} block ids"
            yield time_figure("handle", what, "µs", timing, 1e6, bound)


def _handle(num_blocks: int) -> KVHandle:
    return KVHandle(
        version=VERSION,
        incarnation="0123456789abcdef",
        transport="shm",
        endpoint="123456:42",
        fingerprint="0123456789abcdef" * 2,
        block_ids=tuple(range(1000, 1000 + num_blocks)),
        num_tokens=16 * num_blocks,
        slot=3,
        generation=17,
        expires_unix_s=2e9,
        sequence_id="0123456789abcdef.0",
        first_token=1234,
    )
