"""CUDA IPC without a driver: what is checked before a handle is opened, and in which order it ends.

The contract suite runs over the same fake, in two processes, and over a GPU where there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from exporter_process import pattern
from fake_cuda import FakeCuda
from tandem.errors import PullFailed, PullTimedOut
from tandem.transport.base import DeviceSlab
from tandem.transport.cuda_ipc import CudaIpcPeer, CudaIpcTransport, Descriptor
from tandem.transport.cuda_runtime import device_of_uuid, device_uuid
from transport_exporters import INCARNATION, SHAPE, FakeCudaIpcExporter, GpuSlab

A, B = b"\xaa" * 16, b"\xbb" * 16  # A is the exporter's
ALL = list(range(SHAPE.num_blocks))
SOON_S = 10.0


@pytest.fixture(scope="module")
def exporter() -> Iterator[FakeCudaIpcExporter]:
    exporter = FakeCudaIpcExporter()
    yield exporter
    exporter.die()


@pytest.fixture
def fake() -> FakeCuda:
    return FakeCuda()


def _connect(exporter: FakeCudaIpcExporter, fake: FakeCuda, device: int = 0) -> CudaIpcPeer:
    return CudaIpcTransport(fake, device).connect(exporter.endpoint, INCARNATION)


# ---- the descriptor --------------------------------------------------------------------------


def test_a_descriptor_survives_its_encoding() -> None:
    descriptor = Descriptor("123:4", A.hex(), bytes(range(64)), 7)
    assert Descriptor.parse(str(descriptor)) == descriptor
    assert descriptor.pid == 123


GOOD = str(Descriptor("123:4", A.hex(), bytes(64), 7))


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "123:4",
        GOOD + "0" * 12,
        GOOD + "\n",
        " " + GOOD,
        GOOD.replace("123:4", "123:"),
        GOOD.replace("123:4", "../1:4"),
        GOOD.replace("aa", "AA"),
        GOOD.replace("00", "0", 1),
        GOOD[:-1] + "-7",
        GOOD[:-1],
    ],
)
def test_a_descriptor_of_another_form_is_refused(endpoint: str) -> None:
    with pytest.raises(PullFailed, match="not a CUDA IPC endpoint"):
        Descriptor.parse(endpoint)


# ---- which GPU -------------------------------------------------------------------------------


def test_a_gpu_is_known_by_its_uuid() -> None:
    fake = FakeCuda(uuids=[B, A, b"\xcc\xdd"])  # cupy may end the bytes at a zero
    assert device_uuid(fake, 1) == A.hex()
    assert device_uuid(fake, 2) == "ccdd" + "00" * 14
    assert [device_of_uuid(fake, uuid) for uuid in (A.hex(), B.hex(), "00" * 16)] == [1, 0, None]
    assert device_of_uuid(FakeCuda(uuids=[A, A]), A.hex()) is None, "ambiguous"


@pytest.mark.parametrize(("uuids", "device"), [([A], 0), ([B, A], 0), ([A, B], 1), ([B, A], 1)])
def test_the_exporters_gpu_may_have_another_number_here(
    exporter: FakeCudaIpcExporter, uuids: list[bytes], device: int
) -> None:
    fake = FakeCuda(uuids=uuids)
    peer = _connect(exporter, fake, device)
    target = GpuSlab(fake, SHAPE.num_blocks, SHAPE.block_bytes)
    peer.pull(ALL, target.slab, ALL[::-1], SOON_S)
    np.testing.assert_array_equal(target.read()[0], pattern(ALL[-1], SHAPE.block_bytes))
    peer.close()


@pytest.mark.parametrize(
    ("fake", "problem"),
    [
        (FakeCuda(uuids=[B]), f"GPU {A.hex()} is not visible here"),
        (FakeCuda(uuids=[B, A], can_access_peer=False), "GPU 0 cannot access"),
    ],
)
def test_a_gpu_out_of_reach_is_refused_before_its_handle_is_opened(
    exporter: FakeCudaIpcExporter, fake: FakeCuda, problem: str
) -> None:
    with pytest.raises(PullFailed, match=problem):
        _connect(exporter, fake)
    assert fake.calls == []


def test_the_own_slab_is_refused(fake: FakeCuda) -> None:
    transport = CudaIpcTransport(fake, 0)
    region = transport.export(SHAPE, INCARNATION)
    with pytest.raises(PullFailed, match="this process's own"):
        transport.connect(region.endpoint, INCARNATION)
    assert fake.calls == []
    region.close()
    assert fake.num_allocations == 1, "the exporter never frees"


# ---- connections -----------------------------------------------------------------------------


def _closed_once(fake: FakeCuda) -> bool:
    return fake.calls == ["open", "stream destroyed", "close"]


def test_bytes_that_came_over_wrong_end_the_connection(exporter: FakeCudaIpcExporter) -> None:
    fake = FakeCuda(corrupts=True)
    with pytest.raises(PullFailed, match="self-test brought other bytes"):
        _connect(exporter, fake)
    assert _closed_once(fake)
    assert fake.num_allocations == 0


def test_a_stale_handle_is_a_failed_pull(exporter: FakeCudaIpcExporter, fake: FakeCuda) -> None:
    good = Descriptor.parse(exporter.endpoint)
    stale = Descriptor(good.board, good.uuid, b"1:9999:10".ljust(64, b"\0"), good.num_blocks)
    with pytest.raises(PullFailed, match="CUDA: cudaErrorInvalidResourceHandle"):
        CudaIpcTransport(fake, 0).connect(str(stale), INCARNATION)
    assert fake.calls == []


def test_a_slab_is_unmapped_once(exporter: FakeCudaIpcExporter, fake: FakeCuda) -> None:
    peer = _connect(exporter, fake)
    peer.close()
    peer.close()
    assert _closed_once(fake)
    target = GpuSlab(fake, 1, SHAPE.block_bytes)
    with pytest.raises(PullFailed, match="closed"):
        peer.pull([0], target.slab, [0], SOON_S)


def _fail_to_start(fake: FakeCuda) -> None:
    fake.copy_fails = True


def _fail_on_the_way(fake: FakeCuda) -> None:
    fake.copy_status = 719


@pytest.mark.parametrize(
    ("fail", "problem"),
    [(_fail_to_start, "CUDA: cudaErrorInvalidValue"), (_fail_on_the_way, "CUDA error 719")],
)
def test_a_copy_that_fails_is_a_failed_pull(
    exporter: FakeCudaIpcExporter, fake: FakeCuda, fail: Callable[[FakeCuda], None], problem: str
) -> None:
    peer = _connect(exporter, fake)
    target = GpuSlab(fake, 1, SHAPE.block_bytes)
    fail(fake)
    with pytest.raises(PullFailed, match=problem) as failed:
        peer.pull([0], target.slab, [0], SOON_S)
    assert not isinstance(failed.value, PullTimedOut)
    peer.close()
    assert _closed_once(fake)


def test_late_copies_are_announced_and_keep_the_slab_mapped(
    exporter: FakeCudaIpcExporter, fake: FakeCuda
) -> None:
    peer = _connect(exporter, fake)
    target = GpuSlab(fake, 1, SHAPE.block_bytes)
    fake.is_stuck = True
    with pytest.raises(PullTimedOut, match="longer than 0.01 s") as late:
        peer.pull([2], target.slab, [0], 0.01)
    peer.close()
    assert not late.value.settled.done()
    assert fake.calls == ["open"]
    fake.go_on()
    late.value.settled.result(SOON_S)
    np.testing.assert_array_equal(target.read()[0], pattern(2, SHAPE.block_bytes))
    assert _closed_once(fake)


def test_a_close_during_a_pull_waits_for_it(exporter: FakeCudaIpcExporter, fake: FakeCuda) -> None:
    peer = _connect(exporter, fake)
    target = GpuSlab(fake, 1, SHAPE.block_bytes)
    fake.is_stuck = True
    with ThreadPoolExecutor(1) as threads:
        pull = threads.submit(peer.pull, [1], target.slab, [0], SOON_S)
        while not fake.has_waiting:
            pass
        peer.close()
        assert fake.calls == ["open"]
        fake.go_on()
        assert pull.result(SOON_S) == SHAPE.block_bytes
    assert _closed_once(fake)


def test_torch_can_see_a_slab() -> None:
    slab = DeviceSlab(4096, 3, 10, device=1)
    assert len(slab) == 3
    assert slab.__cuda_array_interface__ == {
        "shape": (3, 10),
        "typestr": "|u1",
        "data": (4096, False),
        "version": 3,
    }
