import pytest

from tandem.engine.batch import Batch
from tandem.engine.batch_builder import build_batch
from tandem.engine.sequence import Sequence
from tandem.types import SamplingParams
from tandem.wire import SequenceSpec

BLOCK_SIZE = 4


def _sequence(prompt: list[int], *, table: list[int], computed: int = 0) -> Sequence:
    spec = SequenceSpec(
        sequence_id="s",
        reply_to="o",
        prompt_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=8),
    )
    return Sequence(1, spec, arrived_s=0.0, block_table=table, num_computed=computed)


def test_a_whole_prompt_is_packed_into_its_blocks() -> None:
    sequence = _sequence([10, 11, 12, 13, 14, 15], table=[7, 3])
    batch = build_batch([(sequence, 6)], BLOCK_SIZE)
    assert batch.token_ids == [10, 11, 12, 13, 14, 15]
    assert batch.positions == [0, 1, 2, 3, 4, 5]
    assert batch.slot_mapping == [28, 29, 30, 31, 12, 13]
    assert batch.sample_rows == [5]
    (piece,) = batch.sequences
    assert (piece.query_len, piece.context_len, piece.block_table) == (6, 6, [7, 3])
    assert piece.is_whole_prompt


def test_a_first_chunk_needs_no_logits() -> None:
    batch = build_batch([(_sequence([*range(10)], table=[0, 1, 2]), 5)], BLOCK_SIZE)
    assert batch.token_ids == [0, 1, 2, 3, 4]
    assert batch.sample_rows == []


def test_a_later_chunk_goes_on_where_the_last_one_ended() -> None:
    sequence = _sequence([*range(10)], table=[5, 1, 2], computed=5)
    batch = build_batch([(sequence, 5)], BLOCK_SIZE)
    assert batch.token_ids == batch.positions == [5, 6, 7, 8, 9]
    assert batch.slot_mapping == [5, 6, 7, 8, 9]
    assert batch.sample_rows == [4]
    assert batch.sequences[0].context_len == 10
    assert not batch.sequences[0].is_whole_prompt


def test_several_sequences_follow_one_another_without_padding() -> None:
    decoding = _sequence([1, 2, 3, 4, 5], table=[9, 8], computed=4)
    first_chunk = _sequence([*range(100, 112)], table=[0, 1, 2])
    whole = _sequence([6, 7], table=[4])
    batch = build_batch([(decoding, 1), (first_chunk, 3), (whole, 2)], BLOCK_SIZE)
    assert batch.token_ids == [5, 100, 101, 102, 6, 7]
    assert batch.positions == [4, 0, 1, 2, 0, 1]
    assert batch.slot_mapping == [32, 0, 1, 2, 16, 17]
    assert batch.cu_seqlens == [0, 1, 4, 6]
    assert batch.sample_rows == [0, 5]
    assert [s.query_len for s in batch.sequences] == [1, 3, 2]
    assert [s.context_len for s in batch.sequences] == [5, 3, 2]
    assert (batch.num_tokens, batch.max_query_len, batch.max_context_len) == (6, 3, 5)


def test_output_tokens_are_part_of_the_sequence() -> None:
    sequence = _sequence([1, 2, 3, 4], table=[2, 6], computed=4)
    sequence.token_ids.append(50)
    batch = build_batch([(sequence, 1)], BLOCK_SIZE)
    assert (batch.token_ids, batch.positions, batch.slot_mapping) == ([50], [4], [24])
    assert batch.sample_rows == [0]


def test_building_changes_no_sequence() -> None:
    sequence = _sequence([1, 2, 3], table=[0])
    build_batch([(sequence, 2)], BLOCK_SIZE)
    assert (sequence.num_computed, sequence.block_table) == (0, [0])


def test_an_empty_schedule_is_an_empty_batch() -> None:
    batch = build_batch([], BLOCK_SIZE)
    assert (batch.num_tokens, batch.max_query_len, batch.max_context_len) == (0, 0, 0)
    assert batch.cu_seqlens == [0]


def test_a_batch_with_fields_of_unequal_length_cannot_be_made() -> None:
    with pytest.raises(AssertionError):
        Batch(token_ids=[1], positions=[], slot_mapping=[0])
