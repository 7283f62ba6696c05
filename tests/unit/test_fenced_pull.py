import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest

from tandem.errors import FenceBroken, PullFailed
from tandem.kv.handle import VERSION, KVHandle
from tandem.kv.lease_board import Lease, LeaseBoard
from tandem.transport.base import Bytes, RegionShape
from tandem.transport.fenced_pull import FencedPuller
from tandem.transport.in_process import InProcessTransport
from tandem.transport.shm import ShmTransport

BLOCK_BYTES = 64
NUM_BLOCKS = 16
TTL_S = 10.0
TIMEOUT_S = 0.5


class Exporter:
    def __init__(self, transport: InProcessTransport, incarnation: str) -> None:
        self.incarnation = incarnation
        self.now_s = 0.0
        shape = RegionShape(NUM_BLOCKS, BLOCK_BYTES, num_slots=NUM_BLOCKS)
        self.region = transport.export(shape, incarnation)
        self.board = LeaseBoard(self.region.slots, TTL_S, lambda: self.now_s)
        for block in range(NUM_BLOCKS):
            self.region.slab[block] = block + 1

    def issue(self, *block_ids: int) -> KVHandle:
        lease = self.board.grant()
        return KVHandle(
            version=VERSION,
            incarnation=self.incarnation,
            transport="in_process",
            endpoint=self.region.endpoint,
            fingerprint="f",
            block_ids=block_ids,
            num_tokens=len(block_ids),
            slot=lease.slot,
            generation=lease.generation,
            expires_unix_s=1e12,
            sequence_id="s",
            first_token=0,
        )


class Setup:
    """One exporter and one puller that share a transport with failures on demand."""

    def __init__(self) -> None:
        self.transport = InProcessTransport()
        self.faults = self.transport.faults
        self.exporter = Exporter(self.transport, "one")
        self.board = self.exporter.board
        self.slab: Bytes = np.zeros((NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
        self.puller = FencedPuller(self.transport, self.slab, TIMEOUT_S)

    def pull(self, handle: KVHandle) -> int:
        return self.puller.pull(handle, handle.block_ids, range(len(handle.block_ids))).num_bytes

    def was_released(self) -> bool:
        return any(released for _, released in self.board.collect())


@pytest.fixture
def setup() -> Setup:
    return Setup()


def _lease(handle: KVHandle) -> Lease:
    return Lease(handle.slot, handle.generation)


def test_a_pull_brings_the_blocks_and_ends_the_lease(setup: Setup) -> None:
    handle = setup.exporter.issue(4, 2, 9)
    result = setup.puller.pull(handle, handle.block_ids, [1, 3, 0])
    assert result.num_bytes == 3 * BLOCK_BYTES and result.seconds >= 0
    assert setup.slab[:4, 0].tolist() == [10, 5, 0, 3]
    assert setup.board.collect() == [(_lease(handle), True)]


def test_a_pull_of_nothing_still_consumes_the_handle(setup: Setup) -> None:
    handle = setup.exporter.issue(4)
    assert setup.puller.pull(handle, [], []).num_bytes == 0
    assert setup.was_released()


def test_a_lease_that_ended_before_breaks_the_fence_and_nothing_moves(setup: Setup) -> None:
    revoked, expired = setup.exporter.issue(1), setup.exporter.issue(2)
    setup.board.revoke(_lease(revoked))
    setup.exporter.now_s += TTL_S
    assert setup.board.collect() == [(_lease(expired), False)]
    for handle in (revoked, expired):
        with pytest.raises(FenceBroken):
            setup.pull(handle)
    assert not setup.slab.any()


def test_the_slots_next_lease_breaks_the_fence_of_an_old_handle(setup: Setup) -> None:
    old = setup.exporter.issue(1)
    setup.board.revoke(_lease(old))
    new = setup.exporter.issue(1)
    assert new.slot == old.slot
    with pytest.raises(FenceBroken, match="generation"):
        setup.pull(old)
    assert setup.pull(new) == BLOCK_BYTES


def _revoke(setup: Setup, handle: KVHandle) -> None:
    setup.board.revoke(_lease(handle))


def _expire(setup: Setup, handle: KVHandle) -> None:
    setup.exporter.now_s += TTL_S
    setup.board.collect()


def _reuse(setup: Setup, handle: KVHandle) -> None:
    setup.board.revoke(_lease(handle))
    setup.exporter.issue(*handle.block_ids)
    setup.exporter.region.slab[list(handle.block_ids)] = 77


@pytest.mark.parametrize("happens", [_revoke, _expire, _reuse])
def test_what_changes_during_the_copy_breaks_the_fence(
    setup: Setup, happens: Callable[[Setup, KVHandle], None]
) -> None:
    handle = setup.exporter.issue(1, 2, 3, 4)
    setup.faults.during_pull = lambda: happens(setup, handle)
    with pytest.raises(FenceBroken):
        setup.pull(handle)
    assert not setup.was_released()


def test_a_renewed_lease_survives_a_slow_copy(setup: Setup) -> None:
    handle = setup.exporter.issue(1, 2)

    def renew() -> None:
        setup.exporter.now_s += TTL_S - 1
        setup.board.renew(_lease(handle))
        setup.exporter.now_s += TTL_S - 1
        assert setup.board.collect() == []

    setup.faults.during_pull = renew
    assert setup.pull(handle) == 2 * BLOCK_BYTES


@pytest.mark.parametrize(
    ("fault", "value", "problem"),
    [
        ("pull_error", "the wire broke", "the wire broke"),
        ("pull_delay_s", TIMEOUT_S + 1, "took longer than 0.5 s"),
        ("connect_error", "no route", "no route"),
    ],
)
def test_a_pull_that_fails_keeps_the_lease_and_may_be_tried_again(
    setup: Setup, fault: str, value: Any, problem: str
) -> None:
    handle = setup.exporter.issue(1)
    setattr(setup.faults, fault, value)
    with pytest.raises(PullFailed, match=problem) as failed:
        setup.pull(handle)
    assert not isinstance(failed.value, FenceBroken)
    assert not setup.was_released()
    setattr(setup.faults, fault, type(value)())
    assert setup.pull(handle) == BLOCK_BYTES


def test_a_handle_is_consumed_once(setup: Setup) -> None:
    handle = setup.exporter.issue(1)
    setup.pull(handle)
    with pytest.raises(FenceBroken, match="consumed"):
        setup.pull(handle)
    assert setup.was_released()
    with pytest.raises(FenceBroken, match="generation"):
        setup.pull(handle)


def test_a_lost_release_ends_with_the_ttl(setup: Setup) -> None:
    handle = setup.exporter.issue(1)
    setup.faults.lose_release = True
    assert setup.pull(handle) == BLOCK_BYTES
    assert setup.board.collect() == []
    setup.exporter.now_s += TTL_S
    assert setup.board.collect() == [(_lease(handle), False)]


@pytest.mark.parametrize(
    ("remote", "local"), [([NUM_BLOCKS], [0]), ([0], [NUM_BLOCKS]), ([-1], [0]), ([0, 1], [0])]
)
def test_blocks_out_of_bounds_keep_the_lease(
    setup: Setup, remote: list[int], local: list[int]
) -> None:
    with pytest.raises(PullFailed):
        setup.puller.pull(setup.exporter.issue(1), remote, local)
    assert not setup.was_released()


def test_a_slot_out_of_bounds_is_a_failed_pull(setup: Setup) -> None:
    handle = setup.exporter.issue(1)
    forged = msgspec.structs.replace(handle, slot=NUM_BLOCKS)
    with pytest.raises(PullFailed, match="lease slot"):
        setup.pull(forged)


class CountingTransport(InProcessTransport):
    """Counts connections, and remembers which peers were closed."""

    def __init__(self) -> None:
        super().__init__()
        self.connected: list[str] = []
        self.closed: list[str] = []

    def connect(self, endpoint: str, incarnation: str) -> Any:
        peer = super().connect(endpoint, incarnation)
        self.connected.append(incarnation)
        peer.close = lambda: self.closed.append(incarnation)  # type: ignore[method-assign]
        return peer


def test_a_connection_is_kept_per_incarnation_and_dropped_once_dead() -> None:
    transport = CountingTransport()
    one, two, three = (Exporter(transport, name) for name in ("one", "two", "three"))
    puller = FencedPuller(transport, np.zeros((4, BLOCK_BYTES), dtype=np.uint8), TIMEOUT_S)
    for exporter in (one, one, two, one):
        puller.pull(exporter.issue(1), [1], [0])
    assert transport.connected == ["one", "two"]
    one.region.close()
    puller.pull(two.issue(1), [1], [0])
    assert transport.closed == []
    puller.pull(three.issue(1), [1], [0])
    assert transport.closed == ["one"]
    puller.close()
    assert transport.closed == ["one", "two", "three"]


def test_a_connection_that_failed_is_made_anew() -> None:
    transport = CountingTransport()
    exporter = Exporter(transport, "one")
    puller = FencedPuller(transport, np.zeros((4, BLOCK_BYTES), dtype=np.uint8), TIMEOUT_S)
    puller.pull(exporter.issue(1), [1], [0])
    transport.faults.is_cut = True
    with pytest.raises(PullFailed, match="the link is cut"):
        puller.pull(exporter.issue(1), [1], [0])
    transport.faults.is_cut = False
    assert puller.pull(exporter.issue(1), [1], [0]).num_bytes == BLOCK_BYTES
    assert (transport.connected, transport.closed) == (["one", "one"], ["one"])


class StuckTransport(InProcessTransport):
    """Connecting to ``stuck`` takes until ``go``."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived = threading.Event()
        self.go = threading.Event()

    def connect(self, endpoint: str, incarnation: str) -> Any:
        if incarnation == "stuck":
            self.arrived.set()
            assert self.go.wait(10)
        return super().connect(endpoint, incarnation)


def test_an_engine_that_does_not_answer_delays_only_its_own_pulls() -> None:
    transport = StuckTransport()
    stuck, healthy = Exporter(transport, "stuck"), Exporter(transport, "healthy")
    puller = FencedPuller(transport, np.zeros((4, BLOCK_BYTES), dtype=np.uint8), TIMEOUT_S)
    with ThreadPoolExecutor(1) as threads:
        pull = threads.submit(puller.pull, stuck.issue(1), [1], [0])
        assert transport.arrived.wait(10)
        assert puller.pull(healthy.issue(2), [2], [1]).num_bytes == BLOCK_BYTES
        assert not pull.done()
        transport.go.set()
        assert pull.result(10).num_bytes == BLOCK_BYTES


def test_a_restarted_exporter_is_another_incarnation(setup: Setup) -> None:
    before = setup.exporter.issue(1)
    setup.exporter.region.close()
    with pytest.raises(PullFailed, match="gone"):
        setup.pull(before)
    assert setup.pull(Exporter(setup.transport, "two").issue(3)) == BLOCK_BYTES
    assert setup.slab[0, 0] == 4


def test_eight_threads_pull_different_handles_from_two_exporters(setup: Setup) -> None:
    other = Exporter(setup.transport, "other")
    other.region.slab += 100
    barrier = threading.Barrier(8, timeout=10)

    def pull(index: int) -> int:
        exporter = other if index % 2 else setup.exporter
        barrier.wait()
        handle = handles[index]
        assert handle.incarnation == exporter.incarnation
        return setup.puller.pull(handle, handle.block_ids, [2 * index, 2 * index + 1]).num_bytes

    handles = [
        (other if index % 2 else setup.exporter).issue(index, index + 8) for index in range(8)
    ]
    with ThreadPoolExecutor(8) as threads:
        assert [*threads.map(pull, range(8))] == [2 * BLOCK_BYTES] * 8
    for index in range(8):
        offset = 101 if index % 2 else 1
        rows = setup.slab[[2 * index, 2 * index + 1]]
        assert (rows == np.array([[index + offset], [index + 8 + offset]])).all()
    for exporter in (setup.exporter, other):
        assert sorted(exporter.board.collect()) == sorted(
            (_lease(h), True) for h in handles if h.incarnation == exporter.incarnation
        )


def test_one_handle_in_eight_threads_moves_right_bytes_or_none(setup: Setup) -> None:
    """A replay beside the first pull may read the same live lease; the bytes are right then."""
    handle = setup.exporter.issue(5)
    barrier = threading.Barrier(8, timeout=10)

    def pull(index: int) -> bool:
        barrier.wait()
        try:
            setup.puller.pull(handle, handle.block_ids, [index])
        except FenceBroken:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        outcomes = [*threads.map(pull, range(8))]
    assert any(outcomes)
    for index, succeeded in enumerate(outcomes):
        assert not succeeded or (setup.slab[index] == 6).all()
    assert setup.board.collect() == [(_lease(handle), True)]


def test_torn_reads_of_real_shared_memory_are_never_believed() -> None:
    """The exporter's thread ends the lease and writes over the blocks while they are copied."""
    num_blocks, block_bytes, num_rounds = 16, 1 << 18, 60
    transport = ShmTransport()
    region = transport.export(RegionShape(num_blocks, block_bytes, 1), "one")
    board = LeaseBoard(region.slots, TTL_S, lambda: 0.0)
    slab: Bytes = np.zeros((num_blocks, block_bytes), dtype=np.uint8)
    puller = FencedPuller(transport, slab, timeout_s=60.0)
    everything = range(num_blocks)
    may_write, was_written = threading.Semaphore(0), threading.Semaphore(0)

    def write_over() -> None:
        for value in range(num_rounds):
            may_write.acquire()
            board.revoke(lease)
            region.slab[:] = value + 100
            was_written.release()

    num_torn = num_refused = 0
    with ThreadPoolExecutor(1) as exporter:
        writing = exporter.submit(write_over)
        for value in range(num_rounds):
            region.slab[:] = value
            lease = board.grant()
            handle = KVHandle(
                version=VERSION,
                incarnation="one",
                transport="shm",
                endpoint=region.endpoint,
                fingerprint="f",
                block_ids=tuple(everything),
                num_tokens=1,
                slot=lease.slot,
                generation=lease.generation,
                expires_unix_s=1e12,
                sequence_id="s",
                first_token=0,
            )
            may_write.release()
            try:
                puller.pull(handle, everything, everything)
            except FenceBroken:
                num_refused += 1
                num_torn += len(np.unique(slab[:, 0])) > 1
            else:
                assert (slab == value).all()
            was_written.acquire()
        writing.result()
    puller.close()
    assert num_refused, f"the test's premise: pulls were disturbed ({num_torn} were torn)"
