"""GB/s of a fenced pull from another process, beside a memcpy of as many bytes."""

from __future__ import annotations

import gc
import multiprocessing
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np

from tandem.kv.handle import VERSION, KVHandle
from tandem.kv.layout import KVLayout
from tandem.kv.lease_board import Lease, LeaseBoard
from tandem.transport import create_transport
from tandem.transport.base import RegionShape
from tandem.transport.fenced_pull import FencedPuller
from tandem_perf.micro.figure import Bound, Figure, MicroOptions, rate_figure
from tandem_perf.micro.timing import Timing, time_repeats

TRANSPORTS = ("shm",)
LAYOUTS = {
    "SmolLM2-135M float32": KVLayout(30, 3, 64, 16, "float32"),
    "8B model bfloat16": KVLayout(32, 8, 128, 16, "bfloat16"),  # Llama-3.1-8B
}
_INCARNATION = "0123456789abcdef"
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class TransportSizes:
    """``pull_bytes``: of one pull, rounded down to whole blocks."""

    block_bytes: dict[str, int]
    pull_bytes: int = 128 << 20  # beyond a last-level cache


def run(options: MicroOptions) -> Iterator[Figure]:
    blocks = {name: layout.block_bytes for name, layout in LAYOUTS.items()}
    return measure(options, TransportSizes(blocks))


def measure(options: MicroOptions, sizes: TransportSizes) -> Iterator[Figure]:
    for transport in TRANSPORTS:
        for name, block_bytes in sizes.block_bytes.items():
            num_blocks = sizes.pull_bytes // block_bytes
            copied = _memcpy(num_blocks * block_bytes, options.repeats)
            num_gb = num_blocks * block_bytes / 1e9
            bound = Bound(value=num_gb / copied.best_cpu_s, reason="memcpy in one process")
            for order, timing in _pulls(transport, num_blocks, block_bytes, options.repeats):
                what = f"{transport}, {num_blocks} {order} blocks of {block_bytes:,} B ({name})"
                yield rate_figure("transport", what, "GB/s", timing, num_gb, bound)


def _pulls(
    transport_name: str, num_blocks: int, block_bytes: int, repeats: int
) -> Iterator[tuple[str, Timing]]:
    """Of all blocks at once: fence, copy, fence, release, as an engine does it."""
    ids = list(range(num_blocks))
    orders = {"contiguous": ids, "scattered": random.Random(0).sample(ids, num_blocks)}
    num_leases = len(orders) * (repeats + 1)  # a lease is pulled once
    shape = RegionShape(num_blocks, block_bytes, num_slots=num_leases)
    transport = create_transport(transport_name)
    own = transport.export(shape, "f" * 16)
    puller = FencedPuller(transport, own.slab, _TIMEOUT_S)
    try:
        with _exporter(transport_name, shape) as (endpoint, leases):
            handles = [_handle(transport_name, endpoint, lease) for lease in leases]
            for order, remote in orders.items():

                def pull(remote: list[int] = remote) -> object:
                    return puller.pull(handles.pop(), remote, ids)

                yield order, time_repeats(pull, repeats)
            assert (own.slab[:, 0] == np.array(orders["scattered"]) % 251).all(), "wrong bytes"
    finally:
        puller.close()
        own.close()
        del own
        gc.collect()  # unmaps the slab before the next one is made


@contextmanager
def _exporter(transport_name: str, shape: RegionShape) -> Iterator[tuple[str, list[Lease]]]:
    """Another process with a region of this shape, and all its leases."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=export, args=(transport_name, shape, there), daemon=True)
    process.start()
    there.close()
    try:
        yield here.recv()
    finally:
        here.close()
        process.join(_TIMEOUT_S)


def export(transport_name: str, shape: RegionShape, parent: Connection) -> None:
    """Runs in the other process until the parent closes its end."""
    region = create_transport(transport_name).export(shape, _INCARNATION)
    region.slab[:] = (np.arange(shape.num_blocks) % 251).astype(np.uint8)[:, None]
    board = LeaseBoard(region.slots, ttl_s=3600.0, clock=time.monotonic)
    parent.send((region.endpoint, [board.grant() for _ in range(shape.num_slots)]))
    try:
        parent.recv()
    except EOFError:
        region.close()


def _handle(transport_name: str, endpoint: str, lease: Lease) -> KVHandle:
    return KVHandle(
        version=VERSION,
        incarnation=_INCARNATION,
        transport=transport_name,
        endpoint=endpoint,
        fingerprint="",
        block_ids=(),
        num_tokens=0,
        slot=lease.slot,
        generation=lease.generation,
        expires_unix_s=0.0,
        sequence_id="s",
        first_token=0,
    )


def _memcpy(num_bytes: int, repeats: int) -> Timing:
    source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    return time_repeats(lambda: np.copyto(target, source), repeats)
