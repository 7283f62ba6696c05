"""Which sequences compute how many tokens in the next step. Torch-free and pure.

Policy, in order: every decoding sequence gets its one token; prefills share what is left of the
token budget, or as much of it as keeps the step within the ITL bound. An eighth of that goes to the
prompt that came first, so that none starves, the rest to the shortest remaining ones. A sequence
gets blocks for all its tokens when it enters the batch; if a decoding sequence finds no block for
its next token, the one that entered last is preempted and computed again later.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from tandem.engine.sequence import Sequence, Status
from tandem.engine.step_cost import StepCost
from tandem.kv.block_manager import BlockManager

OLDEST_SHARE = 8  # one part in so many of the prefill budget is the oldest prompt's


@dataclass
class Schedule:
    """One step: how many tokens each sequence computes, and which pulls start now."""

    slices: list[tuple[Sequence, int]] = field(default_factory=list)
    pulls: list[Sequence] = field(default_factory=list)
    num_decoding: int = 0  # so many of the slices come first, with one token each
    num_prefill_tokens: int = 0


class Scheduler:
    """Owned by the engine loop. Holds every sequence that has not ended."""

    def __init__(
        self,
        blocks: BlockManager,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_itl_s: float = 0.0,
    ) -> None:
        """``max_itl_s`` bounds steps in which sequences decode; 0: nothing does."""
        self._blocks = blocks
        self._block_size = block_size
        self.max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_itl_s = max_itl_s
        self._step_cost = StepCost()
        self.waiting: list[Sequence] = []
        self.pulling: list[Sequence] = []
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []  # in the order in which they entered
        self.num_waiting_tokens = 0  # prompt tokens to compute here, of all that wait or prefill
        self.num_preemptions = 0
        self._num_entries = 0

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self.pulling) + len(self.prefilling) + len(self.decoding)

    @property
    def step_s(self) -> float:
        """What the next step is expected to take."""
        num_decoding = len(self.decoding)
        budget = min(self.num_waiting_tokens, self._prefill_budget(num_decoding))
        return self._step_cost.seconds(num_decoding, budget)

    @property
    def prefill_tokens_per_s(self) -> float:
        """How fast prompts are computed beside what decodes now; 0 if that takes all the time
        that the ITL bound leaves.
        """
        num_decoding = len(self.decoding)
        budget = self._prefill_budget(num_decoding)
        seconds = self._step_cost.seconds(num_decoding, budget)
        if self._is_bounded(num_decoding) and seconds > self._max_itl_s:
            return 0.0
        return budget / seconds

    def observe(self, schedule: Schedule, seconds: float) -> None:
        """This step took so long, with everything that belongs to it."""
        self._step_cost.observe(schedule.num_decoding, schedule.num_prefill_tokens, seconds)

    def add(self, sequence: Sequence) -> None:
        sequence.extend_hashes(self._block_size)
        self.waiting.append(sequence)
        self.num_waiting_tokens += _owed(sequence)

    def end(self, sequence: Sequence) -> None:
        """Takes the sequence out, whatever it is doing, and frees its blocks."""
        self._remove(sequence)
        sequence.status = Status.ENDED
        self._drop_blocks(sequence)

    def end_leased(self, sequence: Sequence) -> list[int]:
        """Takes the sequence out and passes its blocks to a lease; returns them."""
        self._remove(sequence)
        sequence.status = Status.ENDED
        blocks, sequence.block_table = sequence.block_table, []
        self._blocks.lease(blocks)
        return blocks

    def pulled(self, sequence: Sequence) -> None:
        """The sequence's blocks now hold all but its newest token."""
        self._mark_computed(sequence, sequence.num_remaining - 1)
        self._move(sequence, Status.DECODING)

    def computed(self, sequence: Sequence, num_tokens: int) -> None:
        """The KV of the next ``num_tokens`` tokens is in the blocks; full ones can be shared."""
        self._mark_computed(sequence, num_tokens)
        if not sequence.is_decoding:
            self.num_waiting_tokens -= num_tokens
            if sequence.num_remaining == 0:
                self._move(sequence, Status.DECODING)

    def _mark_computed(self, sequence: Sequence, num_tokens: int) -> None:
        first = sequence.num_computed // self._block_size
        sequence.num_computed += num_tokens
        end = sequence.num_computed // self._block_size
        if end > first:  # rarely in a decode step, and there are thousands of those
            for index in range(first, end):
                self._blocks.register(sequence.block_table[index], sequence.hashes[index])

    def append_token(self, sequence: Sequence, token_id: int) -> None:
        sequence.token_ids.append(token_id)
        if len(sequence.token_ids) % self._block_size == 0:
            sequence.extend_hashes(self._block_size)

    def schedule(self, now_s: float) -> Schedule:
        schedule = Schedule()
        for sequence in [*self.decoding]:
            if not sequence.is_decoding:  # preempted for an earlier one
                continue
            has_room = len(sequence.token_ids) <= len(sequence.block_table) * self._block_size
            if has_room or self._make_room(sequence):
                schedule.slices.append((sequence, 1))
        schedule.num_decoding = len(schedule.slices)
        budget = self._prefill_budget(schedule.num_decoding)
        schedule.num_prefill_tokens = self._add_prefills(schedule, budget, now_s)
        return schedule

    def _prefill_budget(self, num_decoding: int) -> int:
        """Prefill tokens of the next step; at least a block, or nothing would ever finish."""
        budget = self._max_num_batched_tokens - num_decoding
        if not self._is_bounded(num_decoding):
            return budget
        within = self._step_cost.prefill_tokens_within(num_decoding, self._max_itl_s)
        return min(budget, max(within, self._block_size))

    def _is_bounded(self, num_decoding: int) -> bool:
        """What is being pulled will decode when this step ends."""
        return self._max_itl_s > 0 and num_decoding + len(self.pulling) > 0

    def _add_prefills(self, schedule: Schedule, budget: int, now_s: float) -> int:
        """Shares out the budget, and starts pulls, which need none; returns the tokens given."""
        order = sorted([*self.prefilling, *self.waiting], key=lambda s: s.num_remaining)
        if not order:
            return 0
        oldest = min(order, key=_age_order)
        order.remove(oldest)
        chunks: dict[Sequence, int] = {}
        left, can_admit = budget, True
        for sequence in (oldest, *order):
            if left == 0 and sequence.handle is None:
                continue
            if sequence.is_waiting:
                can_admit = can_admit and self._admit(sequence, now_s)
                if not can_admit:
                    continue
                if sequence.handle is not None:
                    schedule.pulls.append(sequence)
                    continue
            most = -(-left // OLDEST_SHARE) if sequence is oldest else left
            chunks[sequence] = min(sequence.num_remaining, most)
            left -= chunks[sequence]
        if oldest in chunks:
            rest = min(left, oldest.num_remaining - chunks[oldest])
            chunks[oldest] += rest
            left -= rest
        schedule.slices += chunks.items()
        return budget - left

    def _admit(self, sequence: Sequence, now_s: float) -> bool:
        """Gives a waiting sequence its blocks, if there are enough, and moves it on."""
        if self.num_running >= self.max_num_seqs:
            return False
        # The newest token is always computed: its logits are what we are after.
        matchable = (len(sequence.token_ids) - 1) // self._block_size
        cached = self._blocks.match_prefix(sequence.hashes[:matchable])
        num_new = sequence.num_blocks_needed(self._block_size) - len(cached)
        # Running sequences grow; without a reserve they would push the newcomer out again. One
        # that was pushed out before waits for twice as much room each time, so it ends soon.
        reserve = self.num_running << sequence.num_preemptions
        if num_new + reserve > self._blocks.num_available_besides(cached):
            return False
        self._blocks.share(cached)
        sequence.block_table = cached + self._blocks.allocate(num_new)
        sequence.num_cached = len(cached) * self._block_size
        if sequence.handle is None:
            self.num_waiting_tokens -= sequence.num_cached
        sequence.num_computed = sequence.num_cached
        self._num_entries += 1
        sequence.entry = self._num_entries
        if sequence.scheduled_s is None:
            sequence.scheduled_s = now_s
        self._move(sequence, Status.PREFILLING if sequence.handle is None else Status.PULLING)
        return True

    def _make_room(self, sequence: Sequence) -> bool:
        """A block for the newest token of a decoding sequence; False if it was preempted."""
        while self._blocks.num_available == 0:
            # First in, first served in this step: so no victim was given its slice before.
            last = max([*self.prefilling, *self.decoding[-1:]], key=_entry_order)
            self._preempt(last)
            if last is sequence:
                return False
        sequence.block_table += self._blocks.allocate(1)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.num_waiting_tokens -= _owed(sequence)
        self._move(sequence, Status.WAITING)
        sequence.handle = None  # its KV is computed here the next time
        sequence.num_computed = 0
        self._drop_blocks(sequence)
        self.num_waiting_tokens += _owed(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1

    def _drop_blocks(self, sequence: Sequence) -> None:
        blocks, sequence.block_table = sequence.block_table, []
        self._blocks.free(blocks)

    def _remove(self, sequence: Sequence) -> None:
        self.num_waiting_tokens -= _owed(sequence)
        self._list_of(sequence).remove(sequence)

    def _move(self, sequence: Sequence, status: Status) -> None:
        self._list_of(sequence).remove(sequence)
        sequence.status = status
        if status is Status.DECODING:
            insort(self.decoding, sequence, key=_entry_order)
        else:
            self._list_of(sequence).append(sequence)

    def _list_of(self, sequence: Sequence) -> list[Sequence]:
        return {
            Status.WAITING: self.waiting,
            Status.PULLING: self.pulling,
            Status.PREFILLING: self.prefilling,
            Status.DECODING: self.decoding,
        }[sequence.status]


def _owed(sequence: Sequence) -> int:
    """Prompt tokens that are to be computed here before the sequence decodes."""
    is_owed = sequence.handle is None and sequence.status in (Status.WAITING, Status.PREFILLING)
    return sequence.num_remaining if is_owed else 0


def _entry_order(sequence: Sequence) -> int:
    return sequence.entry


def _age_order(sequence: Sequence) -> tuple[float, int]:
    return sequence.arrived_s, sequence.call_id
