"""Which sequences compute how many tokens in the next step. Torch-free and pure.

Policy, in order: every decoding sequence gets its one token; what is left of the token budget goes
to prefills, shortest remaining work first, where waiting makes a prompt shorter (ageing). A
sequence gets blocks for all its tokens when it enters the batch; if a decoding sequence finds no
block for its next token, the youngest one is preempted and computed again later.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.engine.sequence import Sequence, Status
from tandem.kv.block_manager import BlockManager

AGEING_TOKENS_PER_S = 500.0  # a prompt that waited 2 s is ranked as if 1,000 tokens shorter


@dataclass
class Schedule:
    """One step: how many tokens each sequence computes, and which pulls start now."""

    slices: list[tuple[Sequence, int]] = field(default_factory=list)
    pulls: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Owned by the engine loop. Holds every sequence that has not ended."""

    def __init__(
        self, blocks: BlockManager, block_size: int, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        self._blocks = blocks
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self.waiting: list[Sequence] = []
        self.pulling: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    @property
    def num_waiting_tokens(self) -> int:
        queued = sum(s.num_remaining for s in self.waiting if s.handle is None)
        return queued + sum(s.num_remaining for s in self.running if not s.is_decoding)

    def add(self, sequence: Sequence) -> None:
        sequence.extend_hashes(self._block_size)
        self.waiting.append(sequence)

    def end(self, sequence: Sequence) -> None:
        """Takes the sequence out, whatever it is doing, and frees its blocks."""
        self._list_of(sequence).remove(sequence)
        sequence.status = Status.ENDED
        self._drop_blocks(sequence)

    def end_leased(self, sequence: Sequence) -> list[int]:
        """Takes the sequence out and passes its blocks to a lease; returns them."""
        self.running.remove(sequence)
        sequence.status = Status.ENDED
        blocks, sequence.block_table = sequence.block_table, []
        self._blocks.lease(blocks)
        return blocks

    def pulled(self, sequence: Sequence) -> None:
        """The sequence's blocks now hold all but its newest token."""
        self.pulling.remove(sequence)
        self.running.append(sequence)
        sequence.status = Status.RUNNING
        self.computed(sequence, sequence.num_remaining - 1)

    def computed(self, sequence: Sequence, num_tokens: int) -> None:
        """The KV of the next ``num_tokens`` tokens is in the blocks; full ones can be shared."""
        first = sequence.num_computed // self._block_size
        sequence.num_computed += num_tokens
        for index in range(first, sequence.num_computed // self._block_size):
            self._blocks.register(sequence.block_table[index], sequence.hashes[index])

    def append_token(self, sequence: Sequence, token_id: int) -> None:
        sequence.token_ids.append(token_id)
        if len(sequence.token_ids) % self._block_size == 0:
            sequence.extend_hashes(self._block_size)

    def schedule(self, now_s: float) -> Schedule:
        schedule = Schedule()
        budget = self._max_num_batched_tokens
        for sequence in sorted((s for s in self.running if s.is_decoding), key=_age_order):
            if sequence.status is Status.RUNNING and self._make_room(sequence):
                schedule.slices.append((sequence, 1))
                budget -= 1
        candidates = [s for s in self.running if not s.is_decoding] + self.waiting
        candidates.sort(key=lambda s: s.num_remaining - AGEING_TOKENS_PER_S * (now_s - s.arrived_s))
        can_admit = True
        for sequence in candidates:
            if budget == 0 and sequence.handle is None:
                continue
            if sequence.is_waiting:
                can_admit = can_admit and self._admit(sequence, now_s)
                if not can_admit:
                    continue
                if sequence.handle is not None:
                    schedule.pulls.append(sequence)
                    continue
            chunk = min(sequence.num_remaining, budget)
            schedule.slices.append((sequence, chunk))
            budget -= chunk
        return schedule

    def _admit(self, sequence: Sequence, now_s: float) -> bool:
        """Gives a waiting sequence its blocks, if there are enough, and moves it on."""
        if len(self.running) + len(self.pulling) >= self._max_num_seqs:
            return False
        # The newest token is always computed: its logits are what we are after.
        matchable = (len(sequence.token_ids) - 1) // self._block_size
        cached = self._blocks.match_prefix(sequence.hashes[:matchable])
        num_new = sequence.num_blocks_needed(self._block_size) - len(cached)
        # Running sequences grow; without a reserve they would push the newcomer out again.
        reserve = sum(1 for s in self.running if s.is_decoding)
        if num_new + reserve > self._blocks.num_available_besides(cached):
            return False
        self._blocks.share(cached)
        sequence.block_table = cached + self._blocks.allocate(num_new)
        sequence.num_computed = sequence.num_cached = len(cached) * self._block_size
        if sequence.scheduled_s is None:
            sequence.scheduled_s = now_s
        self.waiting.remove(sequence)
        if sequence.handle is not None:
            sequence.status = Status.PULLING
            self.pulling.append(sequence)
        else:
            sequence.status = Status.RUNNING
            self.running.append(sequence)
        return True

    def _make_room(self, sequence: Sequence) -> bool:
        """A block for the newest token of a decoding sequence; False if it was preempted."""
        if len(sequence.block_table) >= sequence.num_blocks_needed(self._block_size):
            return True
        while self._blocks.num_available == 0:
            # Oldest first is also the order of this step, so no victim was scheduled before.
            youngest = max(self.running, key=_age_order)
            self._preempt(youngest)
            if youngest is sequence:
                return False
        sequence.block_table += self._blocks.allocate(1)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.waiting.append(sequence)
        sequence.status = Status.WAITING
        sequence.handle = None  # its KV is computed here the next time
        sequence.num_computed = 0
        self._drop_blocks(sequence)
        self.num_preemptions += 1

    def _drop_blocks(self, sequence: Sequence) -> None:
        blocks, sequence.block_table = sequence.block_table, []
        self._blocks.free(blocks)

    def _list_of(self, sequence: Sequence) -> list[Sequence]:
        return {
            Status.WAITING: self.waiting,
            Status.PULLING: self.pulling,
            Status.RUNNING: self.running,
        }[sequence.status]


def _age_order(sequence: Sequence) -> tuple[float, int]:
    return sequence.arrived_s, sequence.call_id
