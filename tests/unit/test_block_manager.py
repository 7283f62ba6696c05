from dataclasses import dataclass, field
from typing import TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.kv.block_manager import BlockCounts, BlockManager

NUM_BLOCKS = 8
T = TypeVar("T")


def _digest(name: int | str) -> bytes:
    return str(name).encode()


def test_all_blocks_are_free_at_first() -> None:
    blocks = BlockManager(4)
    assert blocks.counts() == BlockCounts(free=4, cached=0, leased=0, used=0)
    assert blocks.num_available == 4
    blocks.check()


def test_allocated_blocks_are_distinct_and_used() -> None:
    blocks = BlockManager(4)
    given = blocks.allocate(3)
    assert len({*given}) == 3
    assert blocks.counts() == BlockCounts(free=1, cached=0, leased=0, used=3)
    blocks.free(given)
    assert blocks.counts() == BlockCounts(free=4, cached=0, leased=0, used=0)


def test_more_than_there_is_cannot_be_allocated() -> None:
    blocks = BlockManager(2)
    with pytest.raises(AssertionError):
        blocks.allocate(3)


def test_only_hashed_blocks_are_kept_when_freed() -> None:
    blocks = BlockManager(4)
    hashed, plain = blocks.allocate(2)
    blocks.register(hashed, b"a")
    blocks.free([hashed, plain])
    assert blocks.counts() == BlockCounts(free=3, cached=1, leased=0, used=0)
    assert blocks.match_prefix([b"a"]) == [hashed]


def test_a_match_ends_at_the_first_unknown_block() -> None:
    blocks = BlockManager(4)
    table = blocks.allocate(3)
    for block, digest in zip(table, (b"a", b"b", b"c"), strict=True):
        blocks.register(block, digest)
    assert blocks.match_prefix([b"a", b"b", b"x", b"c"]) == table[:2]
    assert blocks.match_prefix([b"x", b"a"]) == []
    assert blocks.match_prefix([]) == []


def test_a_used_block_can_be_shared() -> None:
    blocks = BlockManager(4)
    table = blocks.allocate(1)
    blocks.register(table[0], b"a")
    blocks.share(blocks.match_prefix([b"a"]))
    blocks.free(table)
    assert blocks.counts().used == 1, "the other sequence still has it"
    blocks.free(table)
    assert blocks.counts() == BlockCounts(free=3, cached=1, leased=0, used=0)


def test_a_shared_cached_block_is_no_longer_available() -> None:
    blocks = BlockManager(2)
    table = blocks.allocate(2)
    blocks.register(table[0], b"a")
    blocks.free(table)
    matched = blocks.match_prefix([b"a"])
    assert blocks.num_available == 2
    assert blocks.num_available_besides(matched) == 1
    blocks.share(matched)
    assert blocks.num_available == blocks.num_available_besides(matched) == 1
    assert blocks.allocate(1) != matched


def test_free_blocks_are_taken_before_cached_ones() -> None:
    blocks = BlockManager(2)
    table = blocks.allocate(2)
    blocks.register(table[0], b"a")
    blocks.free(table)
    assert blocks.allocate(1) == [table[1]]
    assert blocks.match_prefix([b"a"]) == [table[0]]


def test_the_least_recently_used_block_is_evicted_first() -> None:
    blocks = BlockManager(3)
    a, b, c = blocks.allocate(3)
    for block, digest in ((a, b"a"), (b, b"b"), (c, b"c")):
        blocks.register(block, digest)
        blocks.free([block])
    blocks.share([a])  # used again: now the youngest
    blocks.free([a])
    assert [blocks.allocate(1) for _ in range(3)] == [[b], [c], [a]]


def test_the_tail_of_a_prefix_is_evicted_before_its_head() -> None:
    blocks = BlockManager(3)
    table = blocks.allocate(3)
    hashes = [b"a", b"b", b"c"]
    for block, digest in zip(table, hashes, strict=True):
        blocks.register(block, digest)
    blocks.free(table)
    for remaining in (2, 1, 0):
        blocks.allocate(1)
        assert blocks.match_prefix(hashes) == table[:remaining]


def test_an_unleased_prefix_is_evicted_tail_first_too() -> None:
    blocks = BlockManager(3)
    table = blocks.allocate(3)
    hashes = [b"a", b"b", b"c"]
    for block, digest in zip(table, hashes, strict=True):
        blocks.register(block, digest)
    blocks.lease(table)
    blocks.unlease(table)
    blocks.allocate(1)
    assert blocks.match_prefix(hashes) == table[:2]


def test_a_hash_is_forgotten_with_its_block() -> None:
    blocks = BlockManager(1)
    (block,) = blocks.allocate(1)
    blocks.register(block, b"a")
    blocks.free([block])
    assert blocks.allocate(1) == [block]
    assert blocks.match_prefix([b"a"]) == []
    blocks.register(block, b"b")
    assert blocks.match_prefix([b"b"]) == [block]


def test_the_first_block_with_a_content_keeps_the_hash() -> None:
    blocks = BlockManager(2)
    first, second = blocks.allocate(2)
    blocks.register(first, b"a")
    blocks.register(second, b"a")
    assert blocks.match_prefix([b"a"]) == [first]
    blocks.free([second])
    assert blocks.counts() == BlockCounts(free=1, cached=0, leased=0, used=1)


def test_leased_blocks_are_neither_used_nor_available() -> None:
    blocks = BlockManager(4)
    table = blocks.allocate(3)
    blocks.lease(table)
    assert blocks.counts() == BlockCounts(free=1, cached=0, leased=3, used=0)
    assert blocks.num_available == 1
    blocks.unlease(table)
    assert blocks.counts() == BlockCounts(free=4, cached=0, leased=0, used=0)


def test_a_leased_block_can_be_matched_and_outlives_its_lease() -> None:
    blocks = BlockManager(2)
    table = blocks.allocate(1)
    blocks.register(table[0], b"a")
    blocks.lease(table)
    assert blocks.num_available_besides(blocks.match_prefix([b"a"])) == 1
    blocks.share(blocks.match_prefix([b"a"]))
    blocks.unlease(table)
    assert blocks.counts() == BlockCounts(free=1, cached=0, leased=0, used=1)
    blocks.free(table)
    assert blocks.counts() == BlockCounts(free=1, cached=1, leased=0, used=0)


def test_two_leases_on_one_block_both_have_to_end() -> None:
    blocks = BlockManager(1)
    table = blocks.allocate(1)
    blocks.register(table[0], b"a")
    blocks.share(table)
    blocks.lease(table)
    blocks.lease(table)
    blocks.unlease(table)
    assert blocks.counts().leased == 1
    blocks.unlease(table)
    assert blocks.counts() == BlockCounts(free=0, cached=1, leased=0, used=0)


def test_what_nobody_holds_cannot_be_freed() -> None:
    blocks = BlockManager(2)
    table = blocks.allocate(1)
    blocks.free(table)
    with pytest.raises(AssertionError):
        blocks.free(table)
    with pytest.raises(AssertionError):
        BlockManager(1).unlease([0])


@dataclass
class Holder:
    """A sequence of the model: its chain of contents, its blocks, how many of them are hashed."""

    contents: list[bytes]
    table: list[int]
    num_hashed: int = field(default=0)


class BlockMachine(RuleBasedStateMachine):
    """Sequences over a few contents, so that prefixes collide; ``memory`` is what a block holds."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(NUM_BLOCKS)
        self.sequences: list[Holder] = []
        self.leases: list[list[int]] = []
        self.memory: dict[int, bytes] = {}

    def _take(self, data: st.DataObject, holders: list[T]) -> T:
        return holders.pop(data.draw(st.integers(0, len(holders) - 1)))

    @rule(branches=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def admit(self, branches: list[int]) -> None:
        """As the scheduler does: match, see whether the rest fits, share, allocate."""
        contents = [_digest("".join(map(str, branches[: i + 1]))) for i in range(len(branches))]
        matched = self.blocks.match_prefix(contents)
        for block, content in zip(matched, contents, strict=False):
            assert self.memory[block] == content, "a hash was served after its block was reused"
        num_new = len(contents) - len(matched)
        if num_new > self.blocks.num_available_besides(matched):
            return
        self.blocks.share(matched)
        new = self.blocks.allocate(num_new)
        held = {b for s in self.sequences for b in s.table} | {b for t in self.leases for b in t}
        assert not held & {*new} and not {*matched} & {*new}
        for block in new:
            self.memory[block] = b"being computed"
        self.sequences.append(Holder(contents, matched + new, len(matched)))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def compute_block(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        if sequence.num_hashed == len(sequence.table):
            return
        index = sequence.num_hashed
        self.memory[sequence.table[index]] = sequence.contents[index]
        self.blocks.register(sequence.table[index], sequence.contents[index])
        sequence.num_hashed += 1
        assert len(self.blocks.match_prefix(sequence.contents)) >= sequence.num_hashed

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        sequence = self._take(data, self.sequences)
        self.blocks.free(sequence.table)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        sequence = self._take(data, self.sequences)
        self.blocks.lease(sequence.table)
        self.leases.append(sequence.table)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def unlease(self, data: st.DataObject) -> None:
        table = self._take(data, self.leases)
        self.blocks.unlease(table)

    @invariant()
    def every_block_is_counted_once(self) -> None:
        self.blocks.check()
        counts = self.blocks.counts()
        assert sum(counts) == NUM_BLOCKS and min(counts) >= 0
        used = {block for sequence in self.sequences for block in sequence.table}
        leased = {block for table in self.leases for block in table} - used
        assert (counts.used, counts.leased) == (len(used), len(leased))
        assert self.blocks.num_available == NUM_BLOCKS - len(used | leased)


TestBlockMachine = BlockMachine.TestCase
BlockMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
