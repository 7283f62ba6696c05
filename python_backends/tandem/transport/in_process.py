"""A transport within one process, with failures on demand: the first-class fake of the tests."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from tandem.errors import PullFailed, PullTimedOut
from tandem.kv.lease_board import Slot
from tandem.transport.base import Bytes, RegionShape, Slab
from tandem.transport.region import RegionView, check_pull, read_header, write_header


@dataclass
class Faults:
    """What goes wrong from now on; the tests write to it."""

    connect_error: str = ""
    pull_error: str = ""
    is_cut: bool = False  # connections fail, and look dead
    pull_delay_s: float = 0.0
    lose_release: bool = False
    timed_out: Future[None] | None = None  # a pull times out, and is settled when this is done
    during_pull: Callable[[], None] | None = None  # runs between two halves of a copy


@dataclass
class InProcessTransport:
    """Regions by name; every engine of a test shares one of these."""

    faults: Faults = field(default_factory=Faults)
    _regions: dict[str, Bytes] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def export(self, shape: RegionShape, incarnation: str) -> InProcessRegion:
        buffer = np.zeros(shape.total_bytes, dtype=np.uint8)
        write_header(buffer, shape, incarnation)
        name = f"region-{next(self._numbers)}"
        self._regions[name] = buffer
        return InProcessRegion(RegionView(buffer, shape), name, self._regions)

    def connect(self, endpoint: str, incarnation: str) -> InProcessPeer:
        if self.faults.connect_error:
            raise PullFailed(self.faults.connect_error)
        if endpoint not in self._regions:
            raise PullFailed(f"the exporting engine is gone: {endpoint!r}")
        buffer = self._regions[endpoint]
        shape = read_header(buffer[: RegionShape.HEADER_BYTES].tobytes(), incarnation)
        return InProcessPeer(RegionView(buffer, shape), endpoint, self)

    def close(self) -> None:
        """Nothing is held."""

    def holds(self, endpoint: str) -> bool:
        return endpoint in self._regions


class InProcessRegion:
    def __init__(self, view: RegionView, endpoint: str, regions: dict[str, Bytes]) -> None:
        self.slab = view.slab
        self.slots = view.slots
        self.endpoint = endpoint
        self._regions = regions

    def close(self) -> None:
        self._regions.pop(self.endpoint, None)


class InProcessPeer:
    def __init__(self, view: RegionView, endpoint: str, transport: InProcessTransport) -> None:
        self.shape = view.shape
        self._view = view
        self._endpoint = endpoint
        self._transport = transport

    @property
    def is_alive(self) -> bool:
        return self._transport.holds(self._endpoint) and not self._transport.faults.is_cut

    def read_slot(self, slot: int) -> Slot:
        return self._view.read_slot(slot)

    def pull(
        self, remote: Sequence[int], slab: Slab, local: Sequence[int], timeout_s: float
    ) -> int:
        faults = self._transport.faults
        assert isinstance(slab, np.ndarray)
        check_pull(self.shape, remote, slab, local)
        if faults.is_cut:
            raise PullFailed("the link is cut")
        if faults.pull_error:
            raise PullFailed(faults.pull_error)
        if faults.timed_out is not None:
            raise PullTimedOut(f"the copy took longer than {timeout_s} s", faults.timed_out)
        if faults.pull_delay_s > timeout_s:
            raise PullFailed(f"the copy took longer than {timeout_s} s")
        time.sleep(faults.pull_delay_s)
        half = len(remote) // 2
        slab[list(local[:half])] = self._view.slab[list(remote[:half])]
        if faults.during_pull is not None:
            faults.during_pull()
        slab[list(local[half:])] = self._view.slab[list(remote[half:])]
        return len(remote) * self.shape.block_bytes

    def release(self, slot: int, generation: int) -> None:
        if not self._transport.faults.lose_release:
            self._view.release(slot, generation)

    def close(self) -> None:
        """Nothing is held."""
