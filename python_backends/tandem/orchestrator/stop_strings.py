"""Ends a text at its first stop string, however the text is cut into pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStringFilter:
    """Passes text on up to the earliest stop string; the stop string itself is never shown.

    The earliest match is the one that begins first in the whole text. So a match has to wait while
    another stop string that begins before it may still be completed.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        """``stop``: non-empty strings; none at all passes everything on."""
        self._stop = tuple(stop)
        self._held = ""  # not shown yet: the tail that could be the beginning of a stop string
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is now safe to show; empty once a stop string has matched."""
        if self.matched is not None:
            return ""
        self._held += text
        undecided = self._undecided_from()
        match = self._earliest_match()
        if match is not None and match[0] <= undecided:
            return self._end_at(match)
        return self._release(undecided)

    def finish(self) -> str:
        """The held-back tail, at the end of the text; here a waiting match can still win."""
        match = self._earliest_match()
        if match is not None:
            return self._end_at(match)
        return self._release(len(self._held))

    def _earliest_match(self) -> tuple[int, str] | None:
        found = ((self._held.find(stop), stop) for stop in self._stop)
        return min((match for match in found if match[0] >= 0), default=None)

    def _undecided_from(self) -> int:
        """Where the longest tail begins that is a proper beginning of a stop string."""
        longest = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        return len(self._held) - longest

    def _end_at(self, match: tuple[int, str]) -> str:
        position, self.matched = match
        text, self._held = self._held[:position], ""
        return text

    def _release(self, end: int) -> str:
        text, self._held = self._held[:end], self._held[end:]
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop``, but not all of it."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
