"""A CUDA runtime without a driver: "device memory" is anonymous shared memory, so that another
process with the same fake can map it by its handle.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tandem.transport.base import Bytes
from tandem.transport.cuda_runtime import NOT_READY, SUCCESS

HANDLE_BYTES = 64


@dataclass
class FakeCuda:
    """The devices that are visible; what goes wrong from now on; and what was called."""

    uuids: Sequence[bytes] = (b"\xaa" * 16,)
    can_access_peer: bool = True
    is_stuck: bool = False  # copies wait until ``go_on``
    copy_fails: bool = False
    corrupts: bool = False
    copy_status: int = SUCCESS
    calls: list[str] = field(default_factory=list)
    _memory: dict[int, tuple[int, Bytes]] = field(default_factory=dict)
    _opened: dict[int, Bytes] = field(default_factory=dict)
    _waiting: list[Callable[[], object]] = field(default_factory=list)
    _events: dict[int, bool] = field(default_factory=dict)
    _streams: set[int] = field(default_factory=set)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    # ---- devices and memory ----------------------------------------------------------------

    def setDevice(self, device: int) -> None:
        assert 0 <= device < len(self.uuids)

    def getDeviceCount(self) -> int:
        return len(self.uuids)

    def getDeviceProperties(self, device: int) -> dict[str, bytes]:
        return {"uuid": self.uuids[device]}

    def deviceCanAccessPeer(self, device: int, peer: int) -> int:
        assert device != peer, "an error of CUDA"
        return int(self.can_access_peer)

    def malloc(self, size: int) -> int:
        descriptor = os.memfd_create("fake-cuda", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, size)
        memory = np.frombuffer(mmap.mmap(descriptor, size), dtype=np.uint8)
        self._memory[memory.ctypes.data] = descriptor, memory
        return int(memory.ctypes.data)

    def free(self, address: int) -> None:
        descriptor, _ = self._memory.pop(address)
        os.close(descriptor)

    def memset(self, address: int, value: int, size: int) -> None:
        ctypes.memset(address, value, size)

    def memcpy(self, to: int, source: int, size: int, kind: int) -> None:
        ctypes.memmove(to, source, size)

    def deviceSynchronize(self) -> None:
        assert not self._waiting

    @property
    def num_allocations(self) -> int:
        return len(self._memory)

    # ---- IPC -------------------------------------------------------------------------------

    def ipcGetMemHandle(self, address: int) -> bytes:
        descriptor, memory = self._memory[address]
        name = f"{os.getpid()}:{descriptor}:{len(memory)}"
        return name.encode().ljust(HANDLE_BYTES, b"\0")

    def ipcOpenMemHandle(self, handle: bytes, flags: int) -> int:
        assert len(handle) == HANDLE_BYTES
        try:
            pid, descriptor, size = handle.rstrip(b"\0").decode().split(":")
            with open(f"/proc/{pid}/fd/{descriptor}", "r+b") as file:
                memory = np.frombuffer(mmap.mmap(file.fileno(), int(size)), dtype=np.uint8)
        except (ValueError, OSError) as error:
            raise RuntimeError(f"cudaErrorInvalidResourceHandle: {error}") from error
        self._opened[memory.ctypes.data] = memory
        self.calls.append("open")
        return int(memory.ctypes.data)

    def ipcCloseMemHandle(self, address: int) -> None:
        assert not self._waiting, "copies from it are under way"
        del self._opened[address]
        self.calls.append("close")

    # ---- streams and events ----------------------------------------------------------------

    def streamCreateWithFlags(self, flags: int) -> int:
        stream = next(self._numbers)
        self._streams.add(stream)
        return stream

    def streamDestroy(self, stream: int) -> None:
        self._streams.remove(stream)
        self.calls.append("stream destroyed")

    def memcpyAsync(self, to: int, source: int, size: int, kind: int, stream: int) -> None:
        assert stream in self._streams
        if self.copy_fails:
            raise RuntimeError("cudaErrorInvalidValue")

        def copy() -> None:
            ctypes.memmove(to, source, size)
            if self.corrupts:
                ctypes.memset(to, 0, 1)

        self._enqueue(copy)

    def eventCreateWithFlags(self, flags: int) -> int:
        event = next(self._numbers)
        self._events[event] = True
        return event

    def eventDestroy(self, event: int) -> None:
        del self._events[event]

    def eventRecord(self, event: int, stream: int) -> None:
        assert stream in self._streams
        self._events[event] = False
        self._enqueue(lambda: self._events.__setitem__(event, True))

    def eventQuery(self, event: int) -> int:
        return self.copy_status if self._events[event] else NOT_READY

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def go_on(self) -> None:
        self.is_stuck = False
        waiting, self._waiting = self._waiting, []
        for work in waiting:
            work()

    def _enqueue(self, work: Callable[[], object]) -> None:
        if self.is_stuck:
            self._waiting.append(work)
        else:
            work()
