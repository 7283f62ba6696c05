"""How fast the queue drains, measured while something waits: an idle server shows no limit."""

from __future__ import annotations

_WINDOW_S = 1.0
_NEWEST = 0.3  # weight of the newest window


class DrainRate:
    """Prompt tokens per second, a moving average over windows in which the queue never was empty.

    Times are in seconds of the caller's clock.
    """

    def __init__(self) -> None:
        self._tokens_per_s: float | None = None
        self._window_start_s: float | None = None
        self._num_tokens = 0

    def count(self, num_tokens: int) -> None:
        """So many tokens left the queue."""
        self._num_tokens += num_tokens

    def note_waiting(self, now_s: float, *, is_waiting: bool) -> None:
        """Called after every change, and now and then without one."""
        if not is_waiting:
            self._window_start_s = None
        elif self._window_start_s is None:
            self._window_start_s, self._num_tokens = now_s, 0
        elif (seconds := now_s - self._window_start_s) >= _WINDOW_S:
            newest = self._num_tokens / seconds
            before = newest if self._tokens_per_s is None else self._tokens_per_s
            self._tokens_per_s = (1 - _NEWEST) * before + _NEWEST * newest
            self._window_start_s, self._num_tokens = now_s, 0

    def seconds_for(self, num_tokens: int) -> float | None:
        """For so many tokens to drain; None as long as nothing was measured."""
        if not num_tokens:
            return 0.0
        return num_tokens / self._tokens_per_s if self._tokens_per_s else None
