"""KV between GPUs of one host: the exporter's slab is mapped by CUDA IPC, blocks are copied.

::

    GPU    slab of num_blocks | probe: a pattern that a new connection copies as its self-test
    host   lease board, in shared memory (see ``shm``): fences take no GPU call

The exporter never frees its slab, and a handle leaves it only after the first token was read from
the same stream that wrote the blocks, so they are complete. Containers need ``--ipc=host`` and a
shared pid namespace.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from tandem.errors import PullFailed, PullTimedOut
from tandem.kv.lease_board import Slot
from tandem.transport.base import Bytes, DeviceSlab, RegionShape, Slab
from tandem.transport.cuda_runtime import (
    EVENT_DISABLE_TIMING,
    LAZY_PEER_ACCESS,
    MEMCPY_DEFAULT,
    NOT_READY,
    STREAM_NON_BLOCKING,
    SUCCESS,
    CudaRuntime,
    device_of_uuid,
    device_uuid,
)
from tandem.transport.region import check_pull, contiguous_runs
from tandem.transport.shm import ShmPeer, ShmRegion

PROBE_BYTES = 4096
_PROBE_TIMEOUT_S = 5.0
_POLL_S = 20e-6
_LATE_POLL_S = 0.01


@dataclass(frozen=True)
class Descriptor:
    """What the endpoint says: where the lease board is, and how to map the slab."""

    board: str
    uuid: str
    handle: bytes
    num_blocks: int

    _PATTERN = re.compile(r"(\d{1,20}:\d{1,20})/([0-9a-f]{32})/([0-9a-f]{128})/(\d{1,12})")

    def __str__(self) -> str:
        return f"{self.board}/{self.uuid}/{self.handle.hex()}/{self.num_blocks}"

    @classmethod
    def parse(cls, endpoint: str) -> Descriptor:
        match = cls._PATTERN.fullmatch(endpoint)
        if match is None:
            raise PullFailed(f"not a CUDA IPC endpoint: {endpoint!r}")
        board, uuid, handle, num_blocks = match.groups()
        return cls(board, uuid, bytes.fromhex(handle), int(num_blocks))

    @property
    def pid(self) -> int:
        return int(self.board.partition(":")[0])


class CudaIpcTransport:
    """``device`` is the ordinal of this engine's GPU."""

    def __init__(self, runtime: CudaRuntime, device: int) -> None:
        self._runtime = runtime
        self._device = device

    def export(self, shape: RegionShape, incarnation: str) -> CudaIpcRegion:
        return CudaIpcRegion(self._runtime, self._device, shape, incarnation)

    def connect(self, endpoint: str, incarnation: str) -> CudaIpcPeer:
        descriptor = Descriptor.parse(endpoint)
        board = ShmPeer(descriptor.board, incarnation)
        try:
            with _as_pull_failed():
                slab = self._map(descriptor, board.shape.block_bytes)
            peer = CudaIpcPeer(self._runtime, board, slab, self._device)
        except BaseException:
            board.close()
            raise
        try:
            peer.test(incarnation)
        except BaseException:
            peer.close()
            raise
        return peer

    def close(self) -> None:
        """Nothing is held."""

    def _map(self, descriptor: Descriptor, block_bytes: int) -> DeviceSlab:
        """The exporter's slab at an address of this process."""
        if descriptor.pid == os.getpid():
            raise PullFailed("the slab is this process's own, which CUDA IPC cannot map")
        runtime = self._runtime
        exporter = device_of_uuid(runtime, descriptor.uuid)
        if exporter is None:
            raise PullFailed(f"the exporter's GPU {descriptor.uuid} is not visible here")
        if exporter != self._device and not runtime.deviceCanAccessPeer(self._device, exporter):
            raise PullFailed(f"GPU {self._device} cannot access the exporter's, GPU {exporter}")
        runtime.setDevice(self._device)
        address = runtime.ipcOpenMemHandle(descriptor.handle, LAZY_PEER_ACCESS)
        return DeviceSlab(address, descriptor.num_blocks, block_bytes, exporter)


class CudaIpcRegion:
    """A slab from cudaMalloc, for the life of the process."""

    def __init__(
        self, runtime: CudaRuntime, device: int, shape: RegionShape, incarnation: str
    ) -> None:
        runtime.setDevice(device)
        slab_bytes = shape.num_blocks * shape.block_bytes
        address = runtime.malloc(slab_bytes + PROBE_BYTES)
        runtime.memset(address, 0, slab_bytes)
        probe = _probe(incarnation)
        runtime.memcpy(address + slab_bytes, probe.ctypes.data, PROBE_BYTES, MEMCPY_DEFAULT)
        runtime.deviceSynchronize()  # before the handle leaves
        self._board = ShmRegion(RegionShape(0, shape.block_bytes, shape.num_slots), incarnation)
        self.slots = self._board.slots
        self.slab = DeviceSlab(address, shape.num_blocks, shape.block_bytes, device)
        handle = runtime.ipcGetMemHandle(address)
        uuid = device_uuid(runtime, device)
        self.endpoint = str(Descriptor(self._board.endpoint, uuid, handle, shape.num_blocks))

    def close(self) -> None:
        """Strangers are no longer let in; the slab stays."""
        self._board.close()


class CudaIpcPeer:
    """A mapping of another process's slab. It is unmapped when it was closed *and* nothing is
    copied from it any more.
    """

    def __init__(
        self, runtime: CudaRuntime, board: ShmPeer, slab: DeviceSlab, device: int
    ) -> None:
        self._runtime = runtime
        self._board = board
        self._slab = slab
        self._device = device
        self._stream = runtime.streamCreateWithFlags(STREAM_NON_BLOCKING)
        self._lock = threading.Lock()
        self._num_copies = 0
        self._is_closed = False
        self.shape = RegionShape(slab.num_blocks, slab.block_bytes, board.shape.num_slots)

    @property
    def is_alive(self) -> bool:
        return self._board.is_alive

    def test(self, incarnation: str) -> None:
        """The self-test of a new connection: a pattern comes over, from device to device."""
        end = self._slab.address + self._slab.num_blocks * self._slab.block_bytes
        arrived: Bytes = np.zeros(PROBE_BYTES, dtype=np.uint8)
        with _as_pull_failed():
            self._runtime.setDevice(self._device)
            landing = self._runtime.malloc(PROBE_BYTES)
            try:
                self._copy([(landing, end, PROBE_BYTES)], _PROBE_TIMEOUT_S)
            except PullTimedOut as error:  # no blocks are in danger; the landing stays
                raise PullFailed(f"the self-test: {error}") from error
            self._runtime.memcpy(arrived.ctypes.data, landing, PROBE_BYTES, MEMCPY_DEFAULT)
            self._runtime.free(landing)
        if (arrived != _probe(incarnation)).any():
            raise PullFailed("the self-test brought other bytes than the exporter's")

    def read_slot(self, slot: int) -> Slot:
        return self._board.read_slot(slot)

    def pull(
        self, remote: Sequence[int], slab: Slab, local: Sequence[int], timeout_s: float
    ) -> int:
        assert isinstance(slab, DeviceSlab)
        check_pull(self.shape, remote, slab, local)
        size = self.shape.block_bytes
        copies = [
            (slab.address + to * size, self._slab.address + source * size, count * size)
            for source, to, count in contiguous_runs(remote, local)
        ]
        if copies:
            with _as_pull_failed():
                self._runtime.setDevice(self._device)
                self._copy(copies, timeout_s)
        return len(remote) * size

    def release(self, slot: int, generation: int) -> None:
        self._board.release(slot, generation)

    def close(self) -> None:
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
            is_idle = self._num_copies == 0
        if is_idle and not was_closed:
            self._unmap()

    # ---- helpers -----------------------------------------------------------------------

    def _copy(self, copies: Sequence[tuple[int, int, int]], timeout_s: float) -> None:
        """``(to, source, bytes)`` each. Raises ``PullTimedOut``; the copies then go on."""
        runtime = self._runtime
        self._begin()
        event = runtime.eventCreateWithFlags(EVENT_DISABLE_TIMING)
        deadline = time.monotonic() + timeout_s
        problem: RuntimeError | None = None
        try:
            for to, source, num_bytes in copies:
                runtime.memcpyAsync(to, source, num_bytes, MEMCPY_DEFAULT, self._stream)
        except RuntimeError as error:  # those before it are under way
            problem = error
        runtime.eventRecord(event, self._stream)
        while (status := runtime.eventQuery(event)) == NOT_READY:
            if time.monotonic() > deadline:
                raise PullTimedOut(f"the copy took longer than {timeout_s} s", self._late(event))
            time.sleep(_POLL_S)
        self._end(event)
        if problem is not None:
            raise problem
        if status != SUCCESS:
            raise PullFailed(f"CUDA error {status} of a copy")

    def _late(self, event: int) -> Future[None]:
        """Done when the copies before ``event`` have ended, which a thread watches."""
        settled: Future[None] = Future()

        def watch() -> None:
            self._runtime.setDevice(self._device)
            while self._runtime.eventQuery(event) == NOT_READY:
                time.sleep(_LATE_POLL_S)
            self._end(event)
            settled.set_result(None)

        threading.Thread(target=watch, name="late-copy", daemon=True).start()
        return settled

    def _begin(self) -> None:
        with self._lock:
            if self._is_closed:
                raise PullFailed("the connection was closed")
            self._num_copies += 1

    def _end(self, event: int) -> None:
        self._runtime.eventDestroy(event)
        with self._lock:
            self._num_copies -= 1
            is_last = self._is_closed and self._num_copies == 0
        if is_last:
            self._unmap()

    def _unmap(self) -> None:
        """The slab before the board: whoever has the slab mapped can still tell who lives."""
        self._runtime.setDevice(self._device)
        self._runtime.streamDestroy(self._stream)
        self._runtime.ipcCloseMemHandle(self._slab.address)
        self._board.close()


def _probe(incarnation: str) -> Bytes:
    """The pattern of one incarnation."""
    seed = int.from_bytes(incarnation.encode(), "little")
    return np.random.default_rng(seed).integers(0, 256, PROBE_BYTES, dtype=np.uint8)


@contextmanager
def _as_pull_failed() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # what cupy raises for an error of CUDA
        raise PullFailed(f"CUDA: {error}") from error
