import struct
from hashlib import blake2b

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.kv.block_hash import ROOT, block_hashes, salted_root
from tandem.orchestrator.prefix_index import PrefixIndex

TOKENS = st.lists(st.integers(0, 3), max_size=20)


def test_a_block_hash_chains_over_all_tokens_before_it() -> None:
    first = blake2b(struct.pack("<2I", 1, 2), digest_size=16).digest()
    second = blake2b(first + struct.pack("<2I", 3, 4), digest_size=16).digest()
    assert block_hashes([1, 2, 3, 4, 5], 2) == [first, second]
    assert block_hashes([9, 2, 3, 4], 2)[1] != second


def test_only_full_blocks_have_a_hash() -> None:
    assert block_hashes([], 4) == []
    assert block_hashes([1, 2, 3], 4) == []
    assert len(block_hashes([1, 2, 3, 4], 4)) == 1


@given(left=TOKENS, right=TOKENS, block_size=st.integers(1, 5))
@settings(max_examples=100)
def test_equal_hashes_are_exactly_the_equal_prefixes(
    left: list[int], right: list[int], block_size: int
) -> None:
    num_full = min(len(left), len(right)) // block_size
    for index in range(num_full):
        end = (index + 1) * block_size
        same_hash = block_hashes(left, block_size)[index] == block_hashes(right, block_size)[index]
        assert same_hash == (left[:end] == right[:end])


def test_two_salts_share_no_block() -> None:
    roots = [salted_root(salt) for salt in ("", "a", "b", "ab")]
    hashes = [digest for root in roots for digest in block_hashes(list(range(12)), 4, root)]
    assert len(set(hashes)) == 12
    assert roots[0] == ROOT and roots[1] == salted_root("a")


def _hashes(token_ids: list[int]) -> list[bytes]:
    return block_hashes(token_ids, 2)


def test_leading_blocks_count_as_cached() -> None:
    index = PrefixIndex(capacity=100)
    index.add(_hashes(list(range(10))))
    assert index.num_cached(_hashes([*range(8), 77, 78, 79])) == 4
    assert index.num_cached(_hashes([*range(5), 77, 78, 79])) == 2
    assert index.num_cached(_hashes([77, *range(1, 10)])) == 0
    assert index.num_cached(_hashes(list(range(10)))) == 5
    assert index.num_cached([]) == 0


def test_the_longest_unused_prompt_is_forgotten_first() -> None:
    index = PrefixIndex(capacity=4)
    old, kept, new = (_hashes([token] * 4) for token in (1, 2, 3))
    for hashes in (old, kept, old, kept, new):
        index.add(hashes)
    assert [index.num_cached(hashes) for hashes in (old, kept, new)] == [0, 2, 2]
    assert len(index) == 4


def test_a_prompt_loses_its_last_block_before_its_first() -> None:
    index = PrefixIndex(capacity=3)
    first, second, long = _hashes([1] * 4), _hashes([2] * 4), _hashes(list(range(10, 21)))
    index.add(first)
    index.add(second)
    assert index.num_cached(first) == 1
    index.add(long)
    assert index.num_cached(long) == 3
