"""From a schedule to a packed batch: which tokens, at which positions, into which slots."""

from __future__ import annotations

from collections.abc import Iterable

from tandem.engine.batch import Batch, SequenceSlice
from tandem.engine.sequence import Sequence


def build_batch(slices: Iterable[tuple[Sequence, int]], block_size: int) -> Batch:
    """A sequence whose last token is in the batch gets its logits computed (``sample_rows``)."""
    token_ids: list[int] = []
    positions: list[int] = []
    slot_mapping: list[int] = []
    parts: list[SequenceSlice] = []
    sample_rows: list[int] = []
    for sequence, num_tokens in slices:
        start, end = sequence.num_computed, sequence.num_computed + num_tokens
        table = sequence.block_table
        if num_tokens == 1:  # decoding: a thousand of these must not hold up a step
            token_ids.append(sequence.token_ids[start])
            positions.append(start)
            slot_mapping.append(table[start // block_size] * block_size + start % block_size)
            parts.append(SequenceSlice(1, end, table))
            if end == len(sequence.token_ids):
                sample_rows.append(len(token_ids) - 1)
            continue
        token_ids.extend(sequence.token_ids[start:end])
        positions.extend(range(start, end))
        slot_mapping.extend(
            table[position // block_size] * block_size + position % block_size
            for position in range(start, end)
        )
        parts.append(SequenceSlice(query_len=num_tokens, context_len=end, block_table=table))
        if num_tokens == sequence.num_remaining:
            sample_rows.append(len(token_ids) - 1)
    return Batch(token_ids, positions, slot_mapping, parts, sample_rows)
