from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np
import pytest

from tandem.engine.exports import MAX_RENEWALS, Exports, Identity
from tandem.engine.imports import Imports, PullDone, PullSettled
from tandem.engine.sequence import Sequence
from tandem.errors import FenceBroken, InvalidHandle, PullFailed, PullTimedOut, to_wire
from tandem.kv import handle as kv_handle
from tandem.kv.block_manager import BlockManager
from tandem.kv.handle import KVHandle
from tandem.kv.lease_board import Lease, LeaseBoard
from tandem.transport.base import RegionShape
from tandem.transport.fenced_pull import FencedPuller
from tandem.transport.in_process import InProcessTransport
from tandem.types import SamplingParams
from tandem.wire import SequenceSpec

BLOCK_SIZE = 4
BLOCK_BYTES = 32
NUM_BLOCKS = 8
SECRET = b"secret"
TTL_S = 10.0
NOW_S = 5_000.0
FINGERPRINT = "model-a"
PROMPT = tuple(range(9))
FIRST_TOKEN = 42


class Exporter:
    """An exporting engine without an engine: slab, blocks, board, exports."""

    def __init__(self, transport: InProcessTransport) -> None:
        self.now_s = 0.0
        self.region = transport.export(RegionShape(NUM_BLOCKS, BLOCK_BYTES, NUM_BLOCKS), "here")
        for block in range(NUM_BLOCKS):
            self.region.slab[block] = block + 1
        self.blocks = BlockManager(NUM_BLOCKS)
        self.board = LeaseBoard(self.region.slots, TTL_S, lambda: self.now_s)
        self.identity = Identity("here", "in_process", self.region.endpoint, FINGERPRINT)
        self.exports = Exports(self.identity, SECRET, self.board, self.blocks, lambda: NOW_S)

    def issue(self, sequence_id: str = "r.0", num_tokens: int = len(PROMPT)) -> bytes:
        table = self.blocks.allocate(-(-num_tokens // BLOCK_SIZE))
        self.blocks.lease(table)
        return self.exports.issue(sequence_id, table, num_tokens, FIRST_TOKEN)

    def collect(self) -> list[bool]:
        """As the lease timer and the engine loop do together."""
        ended = self.board.collect()
        for lease, _ in ended:
            self.exports.ended(lease)
        return [was_released for _, was_released in ended]


@pytest.fixture
def transport() -> InProcessTransport:
    return InProcessTransport()


@pytest.fixture
def exporter(transport: InProcessTransport) -> Exporter:
    return Exporter(transport)


def _verified(blob: bytes) -> KVHandle:
    return kv_handle.verify(blob, SECRET, now_unix_s=NOW_S)


# ---- exports ---------------------------------------------------------------------------------


def test_a_handle_says_who_exports_what_until_when(exporter: Exporter) -> None:
    handle = _verified(exporter.issue())
    assert handle.incarnation == "here"
    assert (handle.transport, handle.endpoint) == ("in_process", exporter.region.endpoint)
    assert handle.fingerprint == FINGERPRINT
    assert handle.sequence_id == "r.0"
    assert (handle.num_tokens, handle.first_token) == (9, FIRST_TOKEN)
    assert len(handle.block_ids) == 3
    assert handle.expires_unix_s == NOW_S + MAX_RENEWALS * TTL_S
    assert exporter.blocks.counts().leased == 3


def test_the_end_of_a_lease_frees_its_blocks(exporter: Exporter) -> None:
    exporter.issue()
    exporter.now_s += TTL_S
    assert exporter.blocks.counts().leased == 3, "not before the fence has moved"
    assert exporter.collect() == [False]
    assert exporter.blocks.counts().free == NUM_BLOCKS


def test_a_revoked_lease_ends_at_once(exporter: Exporter) -> None:
    exporter.issue()
    assert exporter.exports.revoke("r.0")
    assert exporter.blocks.counts().free == NUM_BLOCKS
    assert not exporter.exports.revoke("r.0")
    assert exporter.collect() == []


def test_a_sequence_without_lease_can_be_neither_renewed_nor_revoked(exporter: Exporter) -> None:
    exporter.exports.renew("unknown")
    assert not exporter.exports.revoke("unknown")


def test_a_cancel_between_the_timer_and_the_loop_frees_the_blocks_once(exporter: Exporter) -> None:
    exporter.issue()
    exporter.now_s += TTL_S
    ((lease, _),) = exporter.board.collect()
    assert exporter.exports.revoke("r.0"), "it has one, as far as the loop knows"
    assert exporter.blocks.counts().leased == 3
    exporter.exports.ended(lease)
    assert exporter.blocks.counts().free == NUM_BLOCKS
    exporter.blocks.check()


def test_a_renewed_lease_outlives_its_first_ttl(exporter: Exporter) -> None:
    exporter.issue()
    exporter.now_s += TTL_S - 1
    exporter.exports.renew("r.0")
    exporter.now_s += TTL_S - 1
    assert exporter.collect() == []
    exporter.now_s += 1
    assert exporter.collect() == [False]


def test_two_leases_of_one_sequence_id_end_one_by_one(exporter: Exporter) -> None:
    """Ids are the orchestrator's, but an engine must survive a client that repeats one."""
    first, second = exporter.issue(num_tokens=4), exporter.issue(num_tokens=8)
    handle = _verified(first)
    exporter.board.revoke(Lease(handle.slot, handle.generation))
    exporter.exports.ended(Lease(handle.slot, handle.generation))
    assert exporter.blocks.counts().leased == 2
    assert exporter.exports.revoke("r.0"), "the second is still found by its id"
    assert exporter.blocks.counts().free == NUM_BLOCKS
    assert _verified(second).num_tokens == 8


# ---- imports: verify -------------------------------------------------------------------------


class Importer:
    """Pulls run when the test says so."""

    def __init__(self, transport: InProcessTransport, exporter: Exporter) -> None:
        self.slab = np.zeros((NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
        self.wall_jump_s = 0.0
        self.spawned: list[Callable[[], None]] = []
        self.done: list[PullDone | PullSettled] = []
        self.imports = Imports(
            Identity("there", "in_process", "-", FINGERPRINT),
            SECRET,
            FencedPuller(transport, self.slab, timeout_s=1.0),
            BLOCK_SIZE,
            spawn=self.spawned.append,
            done=self.done.append,
            wall_clock=lambda: NOW_S + self.wall_jump_s,
        )

    def start(self, sequence: Sequence) -> PullDone:
        self.imports.start(sequence)
        assert self.done == []
        (run,) = self.spawned
        run()
        (done,) = self.done
        assert isinstance(done, PullDone)
        assert done.sequence is sequence
        return done


@pytest.fixture
def importer(transport: InProcessTransport, exporter: Exporter) -> Importer:
    return Importer(transport, exporter)


def _spec(**changes: Any) -> SequenceSpec:
    spec = SequenceSpec(
        sequence_id="r.0",
        reply_to="o",
        prompt_ids=PROMPT,
        output_ids=(FIRST_TOKEN,),
        sampling=SamplingParams(max_tokens=8),
    )
    return msgspec.structs.replace(spec, **changes)


def test_the_exporters_handle_is_accepted(exporter: Exporter, importer: Importer) -> None:
    blob = exporter.issue()
    assert importer.imports.verify(blob, _spec()) == _verified(blob)


def test_a_handle_of_a_resumed_sequence_is_accepted(exporter: Exporter, importer: Importer) -> None:
    """Prompt and output so far were prefilled together; the newest token comes after them."""
    spec = _spec(output_ids=(7, 8, FIRST_TOKEN))
    importer.imports.verify(exporter.issue(num_tokens=11), spec)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"version": 2}, "version 2"),
        ({"expires_unix_s": NOW_S - 1}, "expired"),
        ({"transport": "shm"}, "transport shm, here in_process"),
        ({"fingerprint": "model-b"}, "model or KV layout model-b, here model-a"),
        ({"sequence_id": "r.1"}, "issued for sequence r.1"),
        ({"num_tokens": 8}, "holds 8 tokens"),
        ({"num_tokens": 10}, "holds 10 tokens"),
        ({"num_tokens": -1}, "holds -1 tokens"),
        ({"first_token": 43}, "then token 43"),
        ({"block_ids": (0, 1)}, "2 blocks of 4 for 9 tokens"),
        ({"block_ids": (0, 1, 2, 3)}, "4 blocks of 4 for 9 tokens"),
        ({"block_ids": ()}, "0 blocks of 4 for 9 tokens"),
    ],
    ids=str,
)
def test_a_handle_with_a_wrong_field_is_refused(
    exporter: Exporter, importer: Importer, change: dict[str, Any], problem: str
) -> None:
    handle = msgspec.structs.replace(_verified(exporter.issue()), **change)
    with pytest.raises(InvalidHandle, match=problem):
        importer.imports.verify(kv_handle.sign(handle, SECRET), _spec())


@pytest.mark.parametrize(
    "change",
    [
        {"sequence_id": "another"},
        {"prompt_ids": PROMPT[1:]},
        {"output_ids": ()},
        {"output_ids": (41,)},
        {"output_ids": (FIRST_TOKEN, FIRST_TOKEN)},
    ],
    ids=str,
)
def test_a_handle_for_another_sequence_is_refused(
    exporter: Exporter, importer: Importer, change: dict[str, Any]
) -> None:
    with pytest.raises(InvalidHandle):
        importer.imports.verify(exporter.issue(), _spec(**change))


def test_a_forged_handle_is_refused(exporter: Exporter, importer: Importer) -> None:
    blob = kv_handle.sign(_verified(exporter.issue()), b"guessed")
    with pytest.raises(InvalidHandle, match="signature"):
        importer.imports.verify(blob, _spec())


# ---- imports: pull ---------------------------------------------------------------------------


def _sequence(handle: KVHandle, table: list[int], num_cached: int = 0) -> Sequence:
    return Sequence(
        1, _spec(), arrived_s=0.0, handle=handle, block_table=table, num_cached=num_cached
    )


@pytest.mark.parametrize("num_cached_blocks", [0, 1, 2])
def test_only_blocks_that_the_prefix_cache_lacks_are_pulled(
    exporter: Exporter, importer: Importer, num_cached_blocks: int
) -> None:
    handle = _verified(exporter.issue())
    table = [6, 2, 5]
    done = importer.start(_sequence(handle, table, num_cached_blocks * BLOCK_SIZE))
    assert done.error is None and done.result is not None
    assert done.result.num_bytes == (3 - num_cached_blocks) * BLOCK_BYTES
    expected = np.zeros(NUM_BLOCKS, dtype=np.uint8)
    for index in range(num_cached_blocks, 3):
        expected[table[index]] = handle.block_ids[index] + 1
    assert importer.slab[:, 0].tolist() == expected.tolist()
    assert exporter.collect() == [True]


def test_a_cache_that_has_everything_pulls_nothing_and_releases(
    exporter: Exporter, importer: Importer
) -> None:
    handle = _verified(exporter.issue(num_tokens=8))
    # The newest token has a block of its own, which is not the exporter's.
    done = importer.start(_sequence(handle, [6, 2, 5], num_cached=8))
    assert done.result is not None and done.result.num_bytes == 0
    assert not importer.slab.any()
    assert exporter.collect() == [True]


def test_the_block_of_the_newest_token_is_not_pulled(
    exporter: Exporter, importer: Importer
) -> None:
    done = importer.start(_sequence(_verified(exporter.issue(num_tokens=8)), [6, 2, 5]))
    assert done.result is not None and done.result.num_bytes == 2 * BLOCK_BYTES
    assert not importer.slab[5].any()


def test_a_failed_pull_is_reported_and_keeps_the_lease(
    transport: InProcessTransport, exporter: Exporter, importer: Importer
) -> None:
    transport.faults.pull_error = "the wire broke"
    done = importer.start(_sequence(_verified(exporter.issue()), [0, 1, 2]))
    assert done.result is None
    assert isinstance(done.error, PullFailed) and "the wire broke" in str(done.error)
    assert exporter.collect() == []


def test_a_pull_that_timed_out_is_reported_at_once_and_again_when_settled(
    transport: InProcessTransport, exporter: Exporter, importer: Importer
) -> None:
    under_way: Future[None] = Future()
    transport.faults.timed_out = under_way
    sequence = _sequence(_verified(exporter.issue()), [0, 1, 2])
    done = importer.start(sequence)
    assert isinstance(done.error, PullTimedOut) and not done.is_settled
    assert to_wire(done.error) == ("PullFailed", "the copy took longer than 1.0 s")
    under_way.set_result(None)
    assert importer.done == [done, PullSettled(sequence)]


def test_a_broken_fence_is_reported(exporter: Exporter, importer: Importer) -> None:
    handle = _verified(exporter.issue())
    assert exporter.exports.revoke("r.0")
    done = importer.start(_sequence(handle, [0, 1, 2]))
    assert isinstance(done.error, FenceBroken)


def test_any_exception_ends_the_pull(
    transport: InProcessTransport, exporter: Exporter, importer: Importer
) -> None:
    def fail() -> None:
        raise MemoryError("no room")

    transport.faults.during_pull = fail
    done = importer.start(_sequence(_verified(exporter.issue()), [0, 1, 2]))
    assert isinstance(done.error, PullFailed) and "MemoryError: no room" in str(done.error)


def test_a_jump_of_the_wall_clock_can_refuse_a_handle_but_never_revive_one(
    exporter: Exporter, importer: Importer
) -> None:
    """The lease runs on the exporter's monotonic clock; the handle's time only spares an effort."""
    blob = exporter.issue()
    importer.wall_jump_s = MAX_RENEWALS * TTL_S + 1
    with pytest.raises(InvalidHandle, match="expired"):
        importer.imports.verify(blob, _spec())
    importer.wall_jump_s = -1_000_000.0
    handle = importer.imports.verify(blob, _spec())
    exporter.now_s += TTL_S
    assert exporter.collect() == [False]
    done = importer.start(_sequence(handle, [0, 1, 2]))
    assert isinstance(done.error, FenceBroken)
