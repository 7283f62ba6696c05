"""Which prompt prefixes a pool probably has cached: a guess for the router, never for an engine."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from tandem.kv.block_hash import block_hashes, salted_root


class PrefixIndex:
    """The hashes of the last ``capacity`` prompt blocks a pool was given, forgotten LRU."""

    def __init__(self, block_size: int, capacity: int) -> None:
        """``block_size`` in tokens, as the engines have it; ``capacity`` in blocks."""
        self._block_size = block_size
        self._capacity = capacity
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def cached_tokens(self, prompt_ids: Sequence[int], salt: str = "") -> int:
        """Tokens in the whole leading blocks known here; at most all but one of the prompt.

        The last token is always computed, since its logits give the first output token.
        """
        num_cached = 0
        for block in block_hashes(prompt_ids[:-1], self._block_size, salted_root(salt)):
            if block not in self._blocks:
                break
            num_cached += self._block_size
        return num_cached

    def add(self, prompt_ids: Sequence[int], salt: str = "") -> None:
        """Remembers every full block of a prompt that was given to the pool."""
        # Last block first: the first block, which all others need, then is the last to go.
        for block in reversed(block_hashes(prompt_ids, self._block_size, salted_root(salt))):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)
