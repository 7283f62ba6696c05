"""What a worker still has to prefill, as far as its orchestrator can tell between two reports."""

from __future__ import annotations


class Backlog:
    """The prompts this orchestrator has given to one worker and whose end it has not heard of.
    They shrink with time as the worker's scheduler computes them: shortest first.
    """

    def __init__(self) -> None:
        self._left: dict[str, float] = {}  # prompt tokens, by sequence id
        self._drained_s = 0.0
        self.num_tokens = 0.0  # of all of them

    def add(self, sequence_id: str, num_tokens: int) -> None:
        """Call ``drain`` before, or it shrinks by what was computed earlier."""
        self._left[sequence_id] = num_tokens
        self.num_tokens += num_tokens

    def remove(self, sequence_id: str) -> None:
        """It was computed, or is not wanted any more."""
        self.num_tokens -= self._left.pop(sequence_id, 0.0)

    def drain(self, now_s: float, tokens_per_s: float) -> None:
        """The worker has gone on at this rate since the last call."""
        computed = tokens_per_s * (now_s - self._drained_s)
        self._drained_s = now_s
        if self.num_tokens == 0:
            return
        for sequence_id, left in sorted(self._left.items(), key=lambda item: item[1]):
            if computed <= 0:
                break
            self._left[sequence_id] = left - min(left, computed)
            computed -= left
        self.num_tokens = sum(self._left.values())

    def ahead_of(self, num_tokens: int, num_reported: float) -> float:
        """Tokens that are computed before a new prompt is done, besides its own. Of what the worker
        reported, all that is not known here is from others, and counts as earlier.
        """
        ahead = max(0.0, num_reported - self.num_tokens)
        if self.num_tokens > 0:
            ahead += sum(left for left in self._left.values() if left <= num_tokens)
        return ahead
