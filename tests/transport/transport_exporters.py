"""The other side of a transport under test, of which a puller only sees the endpoint."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest

from exporter_process import cuda_runtime, fill, make_transport
from tandem.errors import ConfigError
from tandem.kv.lease_board import Lease, LeaseBoard
from tandem.transport.base import Bytes, DeviceSlab, Region, RegionShape, Slab, Transport
from tandem.transport.cuda_runtime import MEMCPY_DEFAULT, CudaRuntime, load_runtime
from tandem.transport.in_process import InProcessTransport
from two_hosts import FAR_ADDRESS, FAR_HOST, NEAR_ADDRESS, on_host

SHAPE = RegionShape(num_blocks=6, block_bytes=5000, num_slots=3)
INCARNATION = "0123456789abcdef"
CONTROL_TIMEOUT_S = 1.0
NIXL_TCP = {"ucx": {"TLS": "tcp"}, "control_timeout_s": CONTROL_TIMEOUT_S}

needs_nixl = pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in ("nixl_cu12", "nixl_cu13")),
    reason="NIXL is not installed (extra rdma)",
)


def _why_no_gpu() -> str:
    try:
        load_runtime()
    except ConfigError as error:
        return str(error)
    return ""


needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(bool(_why_no_gpu()), reason=_why_no_gpu())]


class LocalSlab(Protocol):
    """Where a puller puts blocks; every byte is 255 at first."""

    @property
    def slab(self) -> Slab: ...
    def read(self) -> Bytes: ...  # [num_blocks, block_bytes]


class HostSlab:
    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.slab = np.full((num_blocks, block_bytes), 255, dtype=np.uint8)

    def read(self) -> Bytes:
        return self.slab


class GpuSlab:
    def __init__(self, runtime: CudaRuntime, num_blocks: int, block_bytes: int) -> None:
        self._runtime = runtime
        address = runtime.malloc(num_blocks * block_bytes)
        runtime.memset(address, 255, num_blocks * block_bytes)
        self.slab = DeviceSlab(address, num_blocks, block_bytes, device=0)

    def read(self) -> Bytes:
        copy = np.empty(self.slab.shape, dtype=np.uint8)
        self._runtime.memcpy(copy.ctypes.data, self.slab.address, copy.nbytes, MEMCPY_DEFAULT)
        return copy


class Exporter(Protocol):
    transport: Transport
    endpoint: str

    def new_slab(self, num_blocks: int, block_bytes: int) -> LocalSlab: ...
    def grant(self) -> Lease: ...
    def revoke(self, lease: Lease) -> bool: ...
    def collect(self) -> list[tuple[Lease, bool]]: ...
    def die(self) -> None: ...


class InProcessExporter:
    def __init__(self) -> None:
        self.transport: Transport = InProcessTransport()
        self._region: Region = self.transport.export(SHAPE, INCARNATION)
        fill(self._region.slab, {})
        self._board = LeaseBoard(self._region.slots, 60.0, lambda: 0.0)
        self.endpoint = self._region.endpoint

    def new_slab(self, num_blocks: int, block_bytes: int) -> LocalSlab:
        return HostSlab(num_blocks, block_bytes)

    def grant(self) -> Lease:
        return self._board.grant()

    def revoke(self, lease: Lease) -> bool:
        return self._board.revoke(lease)

    def collect(self) -> list[tuple[Lease, bool]]:
        return self._board.collect()

    def die(self) -> None:
        self._region.close()


class ProcessExporter:
    """In a process of its own; ``prefix`` starts it elsewhere, e.g. in a network namespace."""

    def __init__(
        self,
        name: str,
        options: dict[str, Any],
        transport: Transport,
        *,
        shape: RegionShape = SHAPE,
        incarnation: str = INCARNATION,
        prefix: Sequence[str] = (),
    ) -> None:
        self.transport = transport
        program = str(Path(__file__).with_name("exporter_process.py"))
        sizes = [str(size) for size in (shape.num_blocks, shape.block_bytes, shape.num_slots)]
        self.process = subprocess.Popen(
            [*prefix, sys.executable, program, name, json.dumps(options), incarnation, *sizes],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.endpoint: str = self._read()

    def new_slab(self, num_blocks: int, block_bytes: int) -> LocalSlab:
        return HostSlab(num_blocks, block_bytes)

    def grant(self) -> Lease:
        return Lease(*self._ask("grant"))

    def revoke(self, lease: Lease) -> bool:
        return bool(self._ask("revoke", *lease))

    def collect(self) -> list[tuple[Lease, bool]]:
        return [(Lease(*lease), released) for lease, released in self._ask("collect")]

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def die(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(timeout=10)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def _read(self) -> Any:
        """UCX logs to stdout as well; what is ours is JSON."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                return json.loads(line)
            except ValueError:
                continue
        raise AssertionError("the exporter died")

    def _ask(self, *command: object) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self._read()


def shm_exporter() -> ProcessExporter:
    return ProcessExporter("shm", {}, make_transport("shm", {}))


class CudaIpcExporter(ProcessExporter):
    options = {"is_fake": False}

    def __init__(self, shape: RegionShape = SHAPE, incarnation: str = INCARNATION) -> None:
        puller = make_transport("cuda_ipc", self.options)
        super().__init__("cuda_ipc", self.options, puller, shape=shape, incarnation=incarnation)

    def new_slab(self, num_blocks: int, block_bytes: int) -> LocalSlab:
        return GpuSlab(cuda_runtime(**self.options), num_blocks, block_bytes)


class FakeCudaIpcExporter(CudaIpcExporter):
    """Two processes, no driver."""

    options = {"is_fake": True}


@cache
def _nixl_puller(options: str) -> Transport:
    """One for all tests: an agent takes half a second to start."""
    return make_transport("nixl", json.loads(options))


class NixlExporter(ProcessExporter):
    """Over whatever UCX picks within a host."""

    here: dict[str, Any] = {}
    there: dict[str, Any] = {}
    prefix: Sequence[str] = ()

    def __init__(self, shape: RegionShape = SHAPE, incarnation: str = INCARNATION) -> None:
        puller = _nixl_puller(json.dumps(self.here))
        super().__init__(
            "nixl", self.there, puller, shape=shape, incarnation=incarnation, prefix=self.prefix
        )


class NixlTcpExporter(NixlExporter):
    here = there = NIXL_TCP


class FarExporter(NixlExporter):
    """On the other of two hosts."""

    here = NIXL_TCP | {"host": NEAR_ADDRESS}
    there = NIXL_TCP | {"host": FAR_ADDRESS}
    prefix = on_host(FAR_HOST)
