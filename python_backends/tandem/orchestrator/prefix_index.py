"""Which blocks a worker probably has cached: a guess for the router, never for an engine."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PrefixIndex:
    """The hashes of the last ``capacity`` prompt blocks a worker was seen to hold; LRU."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def num_cached(self, hashes: Sequence[bytes]) -> int:
        """How many leading blocks of a prompt with these hashes are known here."""
        for index, block in enumerate(hashes):
            if block not in self._blocks:
                return index
        return len(hashes)

    def add(self, hashes: Sequence[bytes]) -> None:
        """Remembers the full blocks of a prompt whose KV is at the worker."""
        # Last block first: the first block, which all others need, then is the last to go.
        for block in reversed(hashes):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)
