"""The transport seam: how KV bytes move from one engine's slab to another's.

::

    exporter                                  puller
    Transport.export() → Region               Transport.connect(endpoint) → Peer
      .slab    all blocks, block-major          .read_slot()  the lease, before and after
      .slots   the lease board                  .pull()       blocks, by id
      .endpoint (goes into the handle)          .release()    the lease, by generation
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tandem.kv.lease_board import SLOT_DTYPE, Slot

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class DeviceSlab:
    """All blocks in the memory of one GPU; torch makes a tensor of it without a copy."""

    address: int
    num_blocks: int
    block_bytes: int
    device: int  # ordinal in this process

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_blocks, self.block_bytes

    def __len__(self) -> int:
        return self.num_blocks

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        data = (self.address, False)
        return {"shape": self.shape, "typestr": "|u1", "data": data, "version": 3}


Slab = Bytes | DeviceSlab  # [num_blocks, block_bytes]

@dataclass(frozen=True)
class RegionShape:
    """Sizes of a region: the lease board, then the slab on a page boundary."""

    num_blocks: int
    block_bytes: int
    num_slots: int

    HEADER_BYTES = 4096
    PAGE_BYTES = 4096

    @property
    def board_bytes(self) -> int:
        return self.num_slots * SLOT_DTYPE.itemsize

    @property
    def slab_offset(self) -> int:
        end = self.HEADER_BYTES + self.board_bytes
        return -(-end // self.PAGE_BYTES) * self.PAGE_BYTES

    @property
    def total_bytes(self) -> int:
        return self.slab_offset + self.num_blocks * self.block_bytes


class Region(Protocol):
    """An exported slab and its lease board; lives as long as the engine."""

    @property
    def slab(self) -> Slab: ...
    @property
    def slots(self) -> npt.NDArray[np.void]: ...  # [num_slots] of SLOT_DTYPE
    @property
    def endpoint(self) -> str: ...
    def close(self) -> None: ...


class Peer(Protocol):
    """Another engine's region, seen from here. Every failure is a ``PullFailed``."""

    @property
    def shape(self) -> RegionShape: ...
    @property
    def is_alive(self) -> bool: ...
    def read_slot(self, slot: int) -> Slot: ...
    def pull(
        self, remote: Sequence[int], slab: Slab, local: Sequence[int], timeout_s: float
    ) -> int:
        """Copies remote blocks into ``slab`` blocks pairwise; returns the bytes moved. After a
        ``PullTimedOut`` they may still be written to until its ``settled`` is done.
        """
        ...

    def release(self, slot: int, generation: int) -> None: ...
    def close(self) -> None: ...


class Transport(Protocol):
    def export(self, shape: RegionShape, incarnation: str) -> Region: ...
    def connect(self, endpoint: str, incarnation: str) -> Peer:
        """The region behind ``endpoint``, if it still belongs to ``incarnation``."""
        ...

    def close(self) -> None:
        """Ends what connections share; regions and peers cannot be used any more."""
        ...
