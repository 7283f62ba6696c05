"""A process that exports a region.

``python exporter_process.py TRANSPORT OPTIONS INCARNATION NUM_BLOCKS BLOCK_BYTES NUM_SLOTS``

It prints its endpoint, then answers commands on stdin, one JSON list a line.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from typing import Any

import numpy as np

from tandem.kv.lease_board import Lease, LeaseBoard
from tandem.transport.base import Bytes, DeviceSlab, RegionShape, Slab, Transport
from tandem.transport.cuda_runtime import MEMCPY_DEFAULT, CudaRuntime, load_runtime


def pattern(block: int, block_bytes: int) -> Bytes:
    """What an exporter has in a block."""
    return (np.arange(block_bytes) * 3 + block * 7).astype(np.uint8)


def make_transport(name: str, options: dict[str, Any]) -> Transport:
    if name == "nixl":
        from tandem.transport.nixl import NixlOptions, NixlTransport

        return NixlTransport(NixlOptions(**options))
    if name == "cuda_ipc":
        from tandem.transport.cuda_ipc import CudaIpcTransport

        return CudaIpcTransport(cuda_runtime(**options), device=0)
    from tandem.transport.shm import ShmTransport

    return ShmTransport()


@cache
def cuda_runtime(is_fake: bool) -> CudaRuntime:
    if is_fake:
        from fake_cuda import FakeCuda

        return FakeCuda()
    return load_runtime()


def fill(slab: Slab, options: dict[str, Any]) -> None:
    """Every block with its pattern."""
    num_blocks, block_bytes = slab.shape
    blocks = np.stack([pattern(block, block_bytes) for block in range(num_blocks)])
    if isinstance(slab, DeviceSlab):
        runtime = cuda_runtime(**options)
        runtime.memcpy(slab.address, blocks.ctypes.data, blocks.nbytes, MEMCPY_DEFAULT)
    else:
        slab[:] = blocks


def main() -> None:
    name, options, incarnation, *sizes = sys.argv[1:]
    shape = RegionShape(*map(int, sizes))
    region = make_transport(name, json.loads(options)).export(shape, incarnation)
    fill(region.slab, json.loads(options))
    board = LeaseBoard(region.slots, 60.0, lambda: 0.0)
    print(json.dumps(region.endpoint), flush=True)
    for line in sys.stdin:
        command, *args = json.loads(line)
        answer: object = None
        if command == "grant":
            answer = board.grant()
        elif command == "revoke":
            answer = board.revoke(Lease(*args))
        elif command == "collect":
            answer = board.collect()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
