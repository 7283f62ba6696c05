"""The state of one request in an engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from tandem.kv.block_hash import block_hashes, salted_root
from tandem.kv.handle import KVHandle
from tandem.types import FinishReason
from tandem.wire import SequenceSpec


class Status(Enum):
    WAITING = auto()  # holds no blocks
    PULLING = auto()  # its blocks are being filled from another engine
    PREFILLING = auto()  # in the batch: tokens before the newest are not computed yet
    DECODING = auto()  # in the batch: one token a step, all before the newest is in the cache
    ENDED = auto()


@dataclass(eq=False)
class Sequence:
    """Owned by the engine loop. ``num_computed`` of its tokens have their KV in its blocks; when
    all of them have, the next token can be sampled.
    """

    call_id: int
    spec: SequenceSpec
    arrived_s: float
    handle: KVHandle | None = None
    status: Status = Status.WAITING
    num_computed: int = 0
    num_cached: int = 0  # prefix tokens that were found here, neither computed nor pulled
    block_table: list[int] = field(default_factory=list)
    entry: int = 0  # the how-manieth it was to get blocks, the last time it did
    num_preemptions: int = 0
    scheduled_s: float | None = None  # when it first got blocks
    token_ids: list[int] = field(init=False)  # prompt + output
    hashes: list[bytes] = field(default_factory=list)  # of its full blocks

    def __post_init__(self) -> None:
        self.token_ids = [*self.spec.prompt_ids, *self.spec.output_ids]

    @property
    def is_waiting(self) -> bool:
        return self.status is Status.WAITING

    @property
    def num_remaining(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - len(self.spec.prompt_ids)

    @property
    def is_decoding(self) -> bool:
        return self.status is Status.DECODING

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[len(self.spec.prompt_ids) :]

    def num_blocks_needed(self, block_size: int) -> int:
        return -(-len(self.token_ids) // block_size)

    def extend_hashes(self, block_size: int) -> None:
        """Hashes every full block of ``token_ids`` that has none yet."""
        parent = self.hashes[-1] if self.hashes else salted_root(self.spec.cache_salt)
        self.hashes += block_hashes(
            self.token_ids[len(self.hashes) * block_size :], block_size, parent
        )

    def finish_reason(self, max_model_len: int) -> FinishReason | None:
        """Why the newest token is the last one, or None."""
        sampling = self.spec.sampling
        if self.token_ids[-1] in sampling.stop_token_ids and self.num_output > sampling.min_tokens:
            return FinishReason.STOP
        if self.num_output >= sampling.max_tokens or len(self.token_ids) >= max_model_len:
            return FinishReason.LENGTH
        return None
