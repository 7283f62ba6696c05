"""One packed step: the tokens of all its sequences one after the other, without padding."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple


class SequenceSlice(NamedTuple):
    """The tokens of one sequence in a step, and where its KV lies.

    Invariant: ``1 <= query_len <= context_len <= len(block_table) * block_size``.
    """

    query_len: int  # its tokens in this step
    context_len: int  # its tokens whose KV exists after this step, the query included
    block_table: list[int]  # block i holds the tokens [i * block_size, (i + 1) * block_size)

    @property
    def is_whole_prompt(self) -> bool:
        """Nothing was cached before: all its keys are in this step."""
        return self.query_len == self.context_len


@dataclass(frozen=True)
class Batch:
    """What the model runner needs for one step; lists, so that building it needs no torch."""

    token_ids: list[int]  # [num_tokens]
    positions: list[int]  # [num_tokens]
    slot_mapping: list[int]  # [num_tokens] block_id * block_size + offset of each token's KV
    sequences: list[SequenceSlice] = field(default_factory=list)  # in packed order
    sample_rows: list[int] = field(default_factory=list)  # packed rows whose logits are needed

    def __post_init__(self) -> None:
        assert len(self.positions) == len(self.slot_mapping) == self.num_tokens
        assert sum(s.query_len for s in self.sequences) == self.num_tokens

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def cu_seqlens(self) -> list[int]:
        """[num_sequences + 1] row where each sequence starts, and the end."""
        return list(accumulate((s.query_len for s in self.sequences), initial=0))

    @property
    def max_query_len(self) -> int:
        return max((s.query_len for s in self.sequences), default=0)

    @property
    def max_context_len(self) -> int:
        return max((s.context_len for s in self.sequences), default=0)
