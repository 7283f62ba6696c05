"""KV between processes of one host, over anonymous shared memory.

The region is a memfd: it is not bounded by the size of /dev/shm (64 MB in a container), has no
name that could be left behind, and the kernel frees it with the last process that maps it, also
after kill -9. A peer opens it as ``/proc/<pid>/fd/<fd>`` (same user, same pid namespace).
"""

from __future__ import annotations

import mmap
import os
import select
import time
from collections.abc import Sequence

import numpy as np

from tandem.errors import PullFailed
from tandem.kv.lease_board import Slot
from tandem.transport.base import RegionShape, Slab
from tandem.transport.region import (
    RegionView,
    check_pull,
    contiguous_runs,
    populate,
    read_header,
    write_header,
)


class ShmTransport:
    def export(self, shape: RegionShape, incarnation: str) -> ShmRegion:
        return ShmRegion(shape, incarnation)

    def connect(self, endpoint: str, incarnation: str) -> ShmPeer:
        return ShmPeer(endpoint, incarnation)

    def close(self) -> None:
        """Nothing is held."""


class ShmRegion:
    """This process's region. Views of it must be dropped before ``close`` frees the memory."""

    def __init__(self, shape: RegionShape, incarnation: str) -> None:
        self._fd = os.memfd_create(f"tandem-{incarnation}", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, shape.total_bytes)
        memory = mmap.mmap(self._fd, shape.total_bytes)
        populate(memory)
        buffer = np.frombuffer(memory, dtype=np.uint8)
        write_header(buffer, shape, incarnation)
        view = RegionView(buffer, shape)
        self.slab = view.slab
        self.slots = view.slots
        self.endpoint = f"{os.getpid()}:{self._fd}"

    def close(self) -> None:
        os.close(self._fd)


class ShmPeer:
    """A mapping of another process's region; stays valid (and fenced off) after its death."""

    def __init__(self, endpoint: str, incarnation: str) -> None:
        pid, _, fd = endpoint.partition(":")
        if not (pid.isdecimal() and fd.isdecimal()):
            raise PullFailed(f"not a shared-memory endpoint: {endpoint!r}")
        try:
            descriptor = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise PullFailed(f"the exporting engine is gone: {error}") from error
        try:
            self.shape = read_header(os.pread(descriptor, 4096, 0), incarnation)
            memory = mmap.mmap(descriptor, self.shape.total_bytes)
            populate(memory)
            buffer = np.frombuffer(memory, dtype=np.uint8)
            self._pidfd = os.pidfd_open(int(pid))
        except (OSError, ValueError, OverflowError) as error:
            raise PullFailed(f"the exporting engine's region cannot be mapped: {error}") from error
        finally:
            os.close(descriptor)
        self._view = RegionView(buffer, self.shape)

    @property
    def is_alive(self) -> bool:
        """Whether the exporting process still runs: a pidfd is readable once it has ended."""
        poller = select.poll()  # select.select refuses descriptors from 1024 on
        poller.register(self._pidfd, select.POLLIN)
        return not poller.poll(0)

    def read_slot(self, slot: int) -> Slot:
        return self._view.read_slot(slot)

    def pull(
        self, remote: Sequence[int], slab: Slab, local: Sequence[int], timeout_s: float
    ) -> int:
        assert isinstance(slab, np.ndarray)
        check_pull(self.shape, remote, slab, local)
        deadline = time.monotonic() + timeout_s
        for remote_start, local_start, count in contiguous_runs(remote, local):
            if time.monotonic() > deadline:
                raise PullFailed(f"the copy took longer than {timeout_s} s")
            source = self._view.slab[remote_start : remote_start + count]
            np.copyto(slab[local_start : local_start + count], source)
        return len(remote) * self.shape.block_bytes

    def release(self, slot: int, generation: int) -> None:
        self._view.release(slot, generation)

    def close(self) -> None:
        """The memory itself is unmapped with the last reference, so a pull under way is safe."""
        os.close(self._pidfd)
