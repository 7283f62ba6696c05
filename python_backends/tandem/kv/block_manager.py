"""Who owns which KV block of a slab. Torch-free and pure: no clock, no memory, only counting.

::

    free ──allocate──▶ used ──free──▶ cached (if hashed) ──evicted by allocate──▶ used
                        │  └────────▶ free
                        └─lease─▶ leased ──unlease──▶ cached / free

``free + cached + leased + used == total`` always; ``check`` proves it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class BlockCounts(NamedTuple):
    free: int
    cached: int
    leased: int
    used: int


class BlockManager:
    """Owned by the engine loop. A block is *used* while a sequence refers to it, *leased* while
    only a lease does, *cached* while nobody does but its content is known by hash.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._sequence_refs = [0] * num_blocks
        self._lease_refs = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._num_used = 0

    @property
    def num_available(self) -> int:
        """Blocks that ``allocate`` can give: free or cached."""
        return len(self._free) + len(self._cached)

    def counts(self) -> BlockCounts:
        free, cached = len(self._free), len(self._cached)
        leased = self.num_blocks - free - cached - self._num_used
        return BlockCounts(free, cached, leased, self._num_used)

    def match_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks that hold the longest known prefix; not yet referenced."""
        blocks = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_available_besides(self, blocks: Iterable[int]) -> int:
        """What ``allocate`` could give after these (cached) blocks were shared."""
        return self.num_available - sum(1 for block in blocks if block in self._cached)

    def share(self, blocks: Iterable[int]) -> None:
        """One more sequence refers to these blocks."""
        for block in blocks:
            if self._sequence_refs[block] == 0:
                self._cached.pop(block, None)
                self._num_used += 1
            self._sequence_refs[block] += 1

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks of unknown content for one sequence; evicts the oldest cached ones."""
        assert count <= self.num_available
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                del self._block_of[self._hash_of.pop(block)]
            self._sequence_refs[block] = 1
            self._num_used += 1
            blocks.append(block)
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """A sequence lets go. The tail goes first, so that prefixes are evicted last."""
        for block in reversed(blocks):
            self._sequence_refs[block] -= 1
            assert self._sequence_refs[block] >= 0
            if self._sequence_refs[block] == 0:
                self._num_used -= 1
                self._settle(block)

    def lease(self, blocks: Sequence[int]) -> None:
        """A sequence's blocks pass to a lease: referenced by it, no more by the sequence."""
        for block in blocks:
            self._lease_refs[block] += 1
        self.free(blocks)

    def unlease(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self._lease_refs[block] -= 1
            assert self._lease_refs[block] >= 0
            self._settle(block)

    def register(self, block: int, digest: bytes) -> None:
        """The block is full and computed: it may be found by its hash. The first one wins."""
        if digest not in self._block_of and block not in self._hash_of:
            self._block_of[digest] = block
            self._hash_of[block] = digest

    def check(self) -> None:
        """Asserts every invariant; O(blocks), for idle moments and tests."""
        referenced = {b for b in range(self.num_blocks) if self._sequence_refs[b]}
        leased = {b for b in range(self.num_blocks) if self._lease_refs[b]} - referenced
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert len(referenced) == self._num_used
        assert not (free & cached or (free | cached) & (referenced | leased))
        assert len(free | cached | referenced | leased) == self.num_blocks
        assert cached <= self._hash_of.keys()
        assert {b: h for h, b in self._block_of.items()} == self._hash_of

    def _settle(self, block: int) -> None:
        if self._sequence_refs[block] or self._lease_refs[block]:
            return
        if block in self._hash_of:
            self._cached[block] = None
        else:
            self._free.append(block)
