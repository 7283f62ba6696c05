"""A fenced pull from another process over every transport of host memory, beside a memcpy."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import cast

import numpy as np

from tandem.errors import ConfigError
from tandem.kv.handle import VERSION, KVHandle
from tandem.kv.layout import KVLayout
from tandem.kv.lease_board import Lease, LeaseBoard, check_fence
from tandem.transport import create_transport
from tandem.transport.base import Bytes, RegionShape, Transport
from tandem.transport.fenced_pull import FencedPuller
from tandem.transport.region import RegionView
from tandem_perf.micro.figure import Bound, Figure, MicroOptions, rate_figure, time_figure
from tandem_perf.micro.timing import Timing, time_repeats

LAYOUTS = {
    "SmolLM2-135M float32": KVLayout(30, 3, 64, 16, "float32"),
    "8B model bfloat16": KVLayout(32, 8, 128, 16, "bfloat16"),  # Llama-3.1-8B
}
TRANSPORTS = ("shm", "nixl", "nixl over tcp")
_INCARNATION = "0123456789abcdef"
_TIMEOUT_S = 60.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TransportSizes:
    """``pull_bytes``: of a pull whose rate is shown; ``timed_bytes``: of those whose time is, in
    blocks of ``timed_block_bytes``. All are rounded down to whole blocks.
    """

    block_bytes: dict[str, int]
    pull_bytes: int = 128 << 20  # beyond a last-level cache
    timed_bytes: tuple[int, ...] = (8 << 20, 64 << 20)
    timed_block_bytes: int = 2 << 20


def make_transport(name: str) -> Transport:
    if name == "nixl over tcp":
        from tandem.transport.nixl import NixlOptions, NixlTransport

        return NixlTransport(NixlOptions(ucx={"TLS": "tcp"}))
    return create_transport(name)


def run(options: MicroOptions) -> Iterator[Figure]:
    blocks = {name: layout.block_bytes for name, layout in LAYOUTS.items()}
    return measure(options, TransportSizes(blocks))


def measure(options: MicroOptions, sizes: TransportSizes) -> Iterator[Figure]:
    for name in TRANSPORTS:
        try:
            transport = make_transport(name)
        except ConfigError as error:
            _log.warning("not measured: %s", error)
            continue
        try:
            for layout, block_bytes in sizes.block_bytes.items():
                num_blocks = sizes.pull_bytes // block_bytes
                yield from _rates(name, transport, layout, num_blocks, block_bytes, options.repeats)
            yield from _times(name, transport, sizes, options.repeats)
        finally:
            transport.close()


def _rates(
    name: str, transport: Transport, layout: str, num_blocks: int, block_bytes: int, repeats: int
) -> Iterator[Figure]:
    """Of all blocks at once."""
    copied = _memcpy(num_blocks * block_bytes, repeats)
    num_gb = num_blocks * block_bytes / 1e9
    bound = Bound(value=num_gb / copied.best_cpu_s, reason="memcpy in one process")
    ids = list(range(num_blocks))
    orders = {"contiguous": ids, "scattered": random.Random(0).sample(ids, num_blocks)}
    num_pulls = len(orders) * (repeats + 1)
    with _pair(name, transport, num_blocks, block_bytes, num_pulls) as pair:
        for order, remote in orders.items():
            timing = pair.time(remote, repeats)
            what = f"{name}, {num_blocks} {order} blocks of {block_bytes:,} B ({layout})"
            yield rate_figure("transport", what, "GB/s", timing, num_gb, bound)


def _times(
    name: str, transport: Transport, sizes: TransportSizes, repeats: int
) -> Iterator[Figure]:
    """Of pulls of some sizes, and of one of nothing: fences and release, the cost of any pull."""
    block_bytes = sizes.timed_block_bytes
    num_blocks = max(sizes.timed_bytes) // block_bytes
    num_pulls = (len(sizes.timed_bytes) + 1) * (repeats + 1)
    with _pair(name, transport, num_blocks, block_bytes, num_pulls) as pair:
        for num_bytes in sizes.timed_bytes:
            ids = list(range(num_bytes // block_bytes))
            copied = _memcpy(len(ids) * block_bytes, repeats)
            bound = Bound(value=copied.best_cpu_s * 1e3, reason="memcpy in one process")
            timing = pair.time(ids, repeats)
            what = f"{name}, a pull of {num_bytes / 2**20:g} MiB"
            yield time_figure("transport", what, "ms", timing, 1e3, bound)
        bound = Bound(value=_lease_work(repeats).best_cpu_s * 1e6, reason="the lease's slot")
        timing = pair.time([], repeats)
        yield time_figure("transport", f"{name}, a pull of nothing", "µs", timing, 1e6, bound)


@dataclass
class _Pair:
    """A puller here, and leases of an exporter in another process."""

    puller: FencedPuller
    slab: Bytes
    handles: list[KVHandle]

    def time(self, remote: Sequence[int], repeats: int) -> Timing:
        """Fence, copy, fence, release, as an engine does it; a lease is pulled once. CPU time is
        that of this process: NIXL copies in threads of its own.
        """
        local = range(len(remote))

        def pull() -> object:
            return self.puller.pull(self.handles.pop(), remote, local)

        timing = time_repeats(pull, repeats, cpu=time.process_time)
        assert (self.slab[: len(remote), 0] == np.array(remote) % 251).all(), "wrong bytes"
        return timing


@contextmanager
def _pair(
    name: str, transport: Transport, num_blocks: int, block_bytes: int, num_pulls: int
) -> Iterator[_Pair]:
    shape = RegionShape(num_blocks, block_bytes, num_slots=num_pulls)
    own = transport.export(shape, "f" * 16)
    slab = cast(Bytes, own.slab)
    puller = FencedPuller(transport, slab, _TIMEOUT_S)
    try:
        with _exporter(name, shape) as (endpoint, leases):
            yield _Pair(puller, slab, [_handle(name, endpoint, lease) for lease in leases])
    finally:
        puller.close()
        own.close()
        del own
        gc.collect()  # unmaps the slab before the next one is made


@contextmanager
def _exporter(name: str, shape: RegionShape) -> Iterator[tuple[str, list[Lease]]]:
    """Another process with a region of this shape, and all its leases."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=export, args=(name, shape, there), daemon=True)
    process.start()
    there.close()
    try:
        yield here.recv()
    finally:
        here.close()
        process.join(_TIMEOUT_S)


def export(name: str, shape: RegionShape, parent: Connection) -> None:
    """Runs in the other process until the parent closes its end."""
    transport = make_transport(name)
    region = transport.export(shape, _INCARNATION)
    slab = cast(Bytes, region.slab)
    slab[:] = (np.arange(shape.num_blocks) % 251).astype(np.uint8)[:, None]
    board = LeaseBoard(region.slots, ttl_s=3600.0, clock=time.monotonic)
    parent.send((region.endpoint, [board.grant() for _ in range(shape.num_slots)]))
    try:
        parent.recv()
    except EOFError:
        region.close()
        transport.close()


def _lease_work(repeats: int) -> Timing:
    """What a pull does to its lease, without another process: two fences and a release."""
    shape = RegionShape(1, 64, num_slots=repeats + 1)
    view = RegionView(np.zeros(shape.total_bytes, np.uint8), shape)
    board = LeaseBoard(view.slots, ttl_s=3600.0, clock=time.monotonic)
    leases = [board.grant() for _ in range(shape.num_slots)]

    def work() -> None:
        lease = leases.pop()
        check_fence(view.read_slot(lease.slot), lease.generation)
        check_fence(view.read_slot(lease.slot), lease.generation)
        view.release(lease.slot, lease.generation)

    return time_repeats(work, repeats)


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
