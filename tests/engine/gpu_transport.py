"""The in-process transport with its slabs in the memory of one GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tandem.transport.base import DeviceSlab, RegionShape, Slab
from tandem.transport.in_process import InProcessPeer, InProcessRegion, InProcessTransport
from tandem.transport.region import RegionView


@dataclass
class GpuTransport(InProcessTransport):
    """Leases are in host memory, as with CUDA IPC. Faults concern the host side only."""

    slabs: dict[str, torch.Tensor] = field(default_factory=dict)  # of an endpoint

    def export(self, shape: RegionShape, incarnation: str) -> InProcessRegion:
        region = super().export(shape, incarnation)
        slab = torch.zeros(shape.num_blocks, shape.block_bytes, dtype=torch.uint8, device="cuda")
        self.slabs[region.endpoint] = slab
        region.slab = DeviceSlab(
            slab.data_ptr(), shape.num_blocks, shape.block_bytes, slab.device.index
        )
        return region

    def connect(self, endpoint: str, incarnation: str) -> GpuPeer:
        peer = super().connect(endpoint, incarnation)
        return GpuPeer(peer._view, endpoint, self)


class GpuPeer(InProcessPeer):
    def __init__(self, view: RegionView, endpoint: str, transport: GpuTransport) -> None:
        super().__init__(view, endpoint, transport)
        self._slabs = transport.slabs
        self._endpoint = endpoint

    def pull(
        self, remote: Sequence[int], slab: Slab, local: Sequence[int], timeout_s: float
    ) -> int:
        assert isinstance(slab, DeviceSlab)
        [own] = [own for own in self._slabs.values() if own.data_ptr() == slab.address]
        own[list(local)] = self._slabs[self._endpoint][list(remote)]
        return len(remote) * self.shape.block_bytes
