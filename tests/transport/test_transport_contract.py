"""One suite over every transport: an exporter, in a process of its own where the transport can."""

import gc
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from exporter_process import pattern
from tandem.errors import ConfigError, PullFailed
from tandem.kv.lease_board import LeaseState, check_fence
from tandem.transport import TransportOptions, create_transport
from tandem.transport.base import Bytes, Peer
from tandem.transport.in_process import InProcessTransport
from tandem.transport.shm import ShmTransport
from tandem.types import TRANSPORTS
from transport_exporters import (
    INCARNATION,
    SHAPE,
    CudaIpcExporter,
    Exporter,
    FakeCudaIpcExporter,
    FarExporter,
    InProcessExporter,
    LocalSlab,
    NixlExporter,
    NixlTcpExporter,
    needs_gpu,
    needs_nixl,
    shm_exporter,
)
from two_hosts import FAR_HOST

NUM_LOCAL = 8
TIMEOUT_S = 5.0

EXPORTERS = [
    pytest.param(InProcessExporter, id="in_process"),
    pytest.param(shm_exporter, id="shm"),
    pytest.param(FakeCudaIpcExporter, id="cuda_ipc_fake"),
    pytest.param(CudaIpcExporter, id="cuda_ipc", marks=needs_gpu),
    pytest.param(NixlExporter, id="nixl", marks=needs_nixl),
    pytest.param(NixlTcpExporter, id="nixl_tcp", marks=needs_nixl),
]
if FAR_HOST:  # see test_transport_two_hosts.py
    EXPORTERS = [pytest.param(FarExporter, id="far")]


def _pattern(block: int) -> Bytes:
    return pattern(block, SHAPE.block_bytes)


@pytest.fixture(scope="module", params=EXPORTERS)
def exporter(request: pytest.FixtureRequest) -> Iterator[Exporter]:
    """Shared, since a process takes a while to start; a test leaves no lease behind."""
    exporter = request.param()
    yield exporter
    exporter.die()


@pytest.fixture(params=EXPORTERS)
def mortal(request: pytest.FixtureRequest) -> Exporter:
    """An exporter that the test lets die."""
    exporter: Exporter = request.param()
    return exporter


@pytest.fixture
def peer(exporter: Exporter) -> Iterator[Peer]:
    peer = exporter.transport.connect(exporter.endpoint, INCARNATION)
    yield peer
    peer.close()


@pytest.fixture
def target(exporter: Exporter) -> LocalSlab:
    """Where the blocks go; all 255."""
    return exporter.new_slab(NUM_LOCAL, SHAPE.block_bytes)


def _slab() -> Bytes:
    return np.full((NUM_LOCAL, SHAPE.block_bytes), 255, dtype=np.uint8)


def test_the_peer_knows_the_shape(peer: Peer) -> None:
    assert peer.shape == SHAPE
    assert peer.is_alive


@pytest.mark.parametrize(
    ("remote", "local"),
    [
        ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]),
        ([0, 1, 2], [5, 6, 7]),
        ([4, 2, 0], [1, 3, 5]),
        ([5, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5]),
        ([0, 1, 2, 3], [7, 6, 5, 4]),
        ([0, 1, 4, 5, 2], [2, 3, 4, 6, 7]),
        ([3, 3], [0, 1]),
        ([5], [7]),
        ([], []),
    ],
    ids=str,
)
def test_a_pull_moves_exactly_these_blocks(
    peer: Peer, target: LocalSlab, remote: Sequence[int], local: Sequence[int]
) -> None:
    num_bytes = peer.pull(remote, target.slab, local, TIMEOUT_S)
    assert num_bytes == len(remote) * SHAPE.block_bytes
    expected = _slab()
    for there, here in zip(remote, local, strict=True):
        expected[here] = _pattern(there)
    np.testing.assert_array_equal(target.read(), expected)


@pytest.mark.parametrize(
    ("remote", "local", "problem"),
    [
        ([0, 6], [0, 1], "remote block 6 of 6"),
        ([-1], [0], "remote block -1"),
        ([2**70], [0], "remote block"),
        ([0], [8], "local block 8 of 8"),
        ([0, 1], [0, -1], "local block -1"),
        ([0, 1], [0], "2 remote blocks for 1"),
        ([], [0], "0 remote blocks for 1"),
    ],
)
def test_a_pull_out_of_bounds_moves_nothing(
    peer: Peer, target: LocalSlab, remote: Sequence[int], local: Sequence[int], problem: str
) -> None:
    with pytest.raises(PullFailed, match=problem):
        peer.pull(remote, target.slab, local, TIMEOUT_S)
    assert (target.read() == 255).all()


def test_blocks_of_another_size_are_refused(exporter: Exporter, peer: Peer) -> None:
    target = exporter.new_slab(NUM_LOCAL, SHAPE.block_bytes // 2)
    with pytest.raises(PullFailed, match="blocks of 5000 bytes, here of 2500"):
        peer.pull([0], target.slab, [0], TIMEOUT_S)


@pytest.mark.parametrize("slot", [-1, 3, 2**40])
def test_a_slot_out_of_range_is_refused(peer: Peer, slot: int) -> None:
    with pytest.raises(PullFailed, match="lease slot"):
        peer.read_slot(slot)
    with pytest.raises(PullFailed, match="lease slot"):
        peer.release(slot, 1)


def test_the_exporter_sees_a_release_and_the_peer_sees_the_lease_end(
    exporter: Exporter, peer: Peer
) -> None:
    lease = exporter.grant()
    slot = peer.read_slot(lease.slot)
    assert (slot.generation, slot.state) == (lease.generation, LeaseState.LEASED)
    check_fence(slot, lease.generation)
    peer.release(lease.slot, lease.generation)
    assert peer.read_slot(lease.slot).released_generation == lease.generation
    assert exporter.collect() == [(lease, True)]
    assert peer.read_slot(lease.slot).state == LeaseState.FREE
    assert peer.read_slot(lease.slot).generation > lease.generation


def test_a_late_release_neither_frees_the_next_lease_nor_undoes_its_release(
    exporter: Exporter, peer: Peer
) -> None:
    old = exporter.grant()
    assert exporter.revoke(old)
    new = exporter.grant()
    assert new.slot == old.slot
    peer.release(*old)
    assert exporter.collect() == []
    peer.release(*new)
    peer.release(*old)
    assert exporter.collect() == [(new, True)]


def test_every_slot_is_its_own(exporter: Exporter, peer: Peer) -> None:
    leases = [exporter.grant() for _ in range(SHAPE.num_slots)]
    peer.release(*leases[1])
    assert exporter.collect() == [(leases[1], True)]
    for lease in (leases[0], leases[2]):
        check_fence(peer.read_slot(lease.slot), lease.generation)
        assert exporter.revoke(lease)


@pytest.mark.parametrize("incarnation", ["", INCARNATION[:-1], INCARNATION + "0", "f" * 32, "é"])
def test_another_incarnation_is_refused(exporter: Exporter, incarnation: str) -> None:
    with pytest.raises(PullFailed, match="another incarnation"):
        exporter.transport.connect(exporter.endpoint, incarnation)


@pytest.mark.parametrize(
    "endpoint",
    ["", ":", "1", "1:", ":1", "-1:3", "a:b", "1:2:3", "../1:2", "999999999:3", "9" * 300 + ":1"],
)
def test_a_garbage_endpoint_is_refused(exporter: Exporter, endpoint: str) -> None:
    with pytest.raises(PullFailed):
        exporter.transport.connect(endpoint, INCARNATION)


def test_an_exporter_that_died_before_cannot_be_connected(mortal: Exporter) -> None:
    mortal.die()
    with pytest.raises(PullFailed, match="the exporting engine is gone"):
        mortal.transport.connect(mortal.endpoint, INCARNATION)


def test_an_exporter_that_dies_after_shows_as_dead(mortal: Exporter) -> None:
    peer = mortal.transport.connect(mortal.endpoint, INCARNATION)
    lease = mortal.grant()
    assert peer.is_alive
    mortal.die()
    assert not peer.is_alive
    peer.release(*lease)  # harmless
    peer.close()


def test_two_regions_of_one_transport_have_their_own_bytes() -> None:
    transport = InProcessTransport()
    first, second = (transport.export(SHAPE, name) for name in ("a", "b"))
    first.close()
    third = transport.export(SHAPE, "c")
    assert third.endpoint != second.endpoint
    assert transport.connect(second.endpoint, "b").shape == SHAPE
    assert transport.connect(third.endpoint, "c").shape == SHAPE


# ---- shm only ------------------------------------------------------------------------------


def _maps(pid: int | str) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def test_shared_memory_has_no_name_and_ends_with_the_last_process() -> None:
    exporter = shm_exporter()
    pid, _, fd = exporter.endpoint.partition(":")
    memfd = f"/memfd:tandem-{INCARNATION}"
    assert os.readlink(f"/proc/{pid}/fd/{fd}").startswith(memfd)
    assert not [name for name in os.listdir("/dev/shm") if INCARNATION in name]

    gc.collect()
    assert memfd not in _maps("self")
    descriptors = set(os.listdir("/proc/self/fd"))
    peer = exporter.transport.connect(exporter.endpoint, INCARNATION)
    assert memfd in _maps("self") and memfd in _maps(pid)
    exporter.die()
    assert not Path(f"/proc/{pid}").exists()
    slab = _slab()
    peer.pull([1], slab, [0], TIMEOUT_S)
    np.testing.assert_array_equal(slab[0], _pattern(1))
    peer.close()
    del peer
    assert memfd not in _maps("self")
    assert set(os.listdir("/proc/self/fd")) <= descriptors


def test_an_exporter_gives_its_memory_back() -> None:
    region = ShmTransport().export(SHAPE, "closing")
    region.close()
    del region
    assert "/memfd:tandem-closing" not in _maps("self")


def test_a_refused_connection_keeps_nothing_open() -> None:
    region = ShmTransport().export(SHAPE, INCARNATION)
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        with pytest.raises(PullFailed):
            ShmTransport().connect(region.endpoint, "another")
    assert os.listdir("/proc/self/fd") == before
    region.close()


def test_a_file_that_is_no_region_is_refused(tmp_path: Path) -> None:
    header = b"TANDEMKV" + INCARNATION.encode().ljust(32, b"\0")
    sizes = {
        "too short": b"",
        "another incarnation": b"x" * 4096,
        "cannot be mapped": header + (2**20).to_bytes(8, "little") * 3,
        "region": header + b"\xff" * 24,
    }
    for problem, content in sizes.items():
        path = tmp_path / "file"
        path.write_bytes(content)
        with path.open("rb") as file, pytest.raises(PullFailed, match=problem):
            ShmTransport().connect(f"{os.getpid()}:{file.fileno()}", INCARNATION)


def test_a_copy_that_takes_too_long_is_given_up() -> None:
    region = ShmTransport().export(SHAPE, INCARNATION)
    peer = ShmTransport().connect(region.endpoint, INCARNATION)
    with pytest.raises(PullFailed, match="longer than -1"):
        peer.pull([0], _slab(), [0], timeout_s=-1)
    peer.close()
    region.close()


def test_transports_are_found_by_name() -> None:
    assert isinstance(create_transport("shm"), ShmTransport)
    with pytest.raises(ConfigError, match=f"'rdma': known are: {', '.join(TRANSPORTS)}$"):
        create_transport("rdma")


def test_a_transport_that_cannot_reach_the_slab_is_refused() -> None:
    with pytest.raises(ConfigError, match="'shm': needs device = cpu, not cuda"):
        create_transport("shm", TransportOptions(device="cuda:1"))
    with pytest.raises(ConfigError, match="'cuda_ipc': needs device = cuda, not cpu"):
        create_transport("cuda_ipc")
