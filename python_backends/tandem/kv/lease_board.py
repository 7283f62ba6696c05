"""Leases on exported blocks, and the shared slots that fence them.

::

    slot (24 bytes, shared)   generation | state | released_generation
                              written by the exporter      written by the puller

A puller reads its slot before and after the copy; unless both reads show its own generation,
LEASED and not released, the bytes it copied belong to nobody and are thrown away.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tandem.errors import FenceBroken

SLOT_DTYPE = np.dtype([("generation", "<u8"), ("state", "<u8"), ("released_generation", "<u8")])


class LeaseState(IntEnum):
    FREE = 0
    LEASED = 1


class Slot(NamedTuple):
    """One reading of a slot."""

    generation: int
    state: int
    released_generation: int


class Lease(NamedTuple):
    slot: int
    generation: int


def check_fence(slot: Slot, generation: int) -> None:
    """Raises ``FenceBroken`` unless the slot still belongs to the lease ``generation``."""
    if slot.generation != generation:
        raise FenceBroken(f"lease generation is {slot.generation}, the handle's is {generation}")
    if slot.state != LeaseState.LEASED:
        raise FenceBroken("the lease has ended")
    if slot.released_generation == generation:
        raise FenceBroken("the handle was consumed before")


class LeaseBoard:
    """The exporter's side. The engine loop grants, renews and revokes; a timer thread calls
    ``collect``. ``slots`` is an array of ``SLOT_DTYPE`` in the shared memory of the slab.
    """

    def __init__(self, slots: npt.NDArray[np.void], ttl_s: float, clock: Callable[[], float]):
        self.ttl_s = ttl_s
        self._slots = slots
        self._clock = clock
        self._lock = threading.Lock()
        self._deadlines: dict[Lease, float] = {}
        self._free = list(range(len(slots) - 1, -1, -1))
        self._wake = threading.Event()

    @property
    def num_leases(self) -> int:
        return len(self._deadlines)

    def can_grant(self) -> bool:
        return bool(self._free)

    def grant(self) -> Lease:
        with self._lock:
            index = self._free.pop()
            generation = int(self._slots[index]["generation"]) + 1
            self._slots[index]["generation"] = generation
            self._slots[index]["state"] = LeaseState.LEASED
            lease = Lease(index, generation)
            self._deadlines[lease] = self._clock() + self.ttl_s
        self._wake.set()
        return lease

    def renew(self, lease: Lease) -> None:
        """Another ttl from now; a lease that has ended stays ended."""
        with self._lock:
            if lease in self._deadlines:
                self._deadlines[lease] = self._clock() + self.ttl_s

    def revoke(self, lease: Lease) -> bool:
        """Ends the lease now; False if it had ended before."""
        with self._lock:
            return self._end(lease)

    def collect(self) -> list[tuple[Lease, bool]]:
        """Ends every released or expired lease: ``(lease, was it released by its puller)``."""
        ended = []
        with self._lock:
            now = self._clock()
            for lease, deadline in list(self._deadlines.items()):
                released = int(self._slots[lease.slot]["released_generation"]) == lease.generation
                if released or now >= deadline:
                    self._end(lease)
                    ended.append((lease, released))
        return ended

    def wait_for_leases(self, timeout_s: float) -> bool:
        """Blocks the timer thread while there is nothing to watch."""
        if self._deadlines:
            return True
        self._wake.clear()
        return bool(self._deadlines) or self._wake.wait(timeout_s)

    def _end(self, lease: Lease) -> bool:
        if self._deadlines.pop(lease, None) is None:
            return False
        # The generation moves before the blocks can be reused: that is the fence.
        self._slots[lease.slot]["generation"] = lease.generation + 1
        self._slots[lease.slot]["state"] = LeaseState.FREE
        self._free.append(lease.slot)
        return True
