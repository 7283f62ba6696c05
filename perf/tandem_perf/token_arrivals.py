"""When the tokens of one request arrived."""

from __future__ import annotations

from collections.abc import Callable


class TokenArrivals:
    """Stamps each chunk at once; its tokens have equal times."""

    def __init__(self, clock: Callable[[], float], on_tokens: Callable[[int], None]) -> None:
        self.times_s: list[float] = []
        self.has_chunks = False
        self._clock = clock
        self._on_tokens = on_tokens

    def add(self, num_tokens: int) -> None:
        now_s = self._clock()
        if num_tokens == 1:
            self.times_s.append(now_s)
        else:
            self.times_s.extend([now_s] * num_tokens)
            self.has_chunks = True
        self._on_tokens(num_tokens)
