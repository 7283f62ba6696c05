"""How often a request is placed again, and alone after an engine died under it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tandem.errors import EngineDied, EngineFault, ShuttingDown, TandemError

MAX_DEATHS = 2  # engines that may die in a row under one request, before it is to blame
_MAX_PAUSE_S = 2.0


class Attempts:
    """The failures of one request since its last new token. Owned by the task that serves it.

    Whatever ran on a dead engine is under suspicion until it gets a token again. Suspects share
    ``probation`` and are placed one at a time: the one that kills engines soon stands alone, and
    the others do not lose a second engine to it.
    """

    def __init__(self, max_attempts: int, probation: asyncio.Lock) -> None:
        self._max_attempts = max_attempts
        self._probation = probation
        self._is_on_probation = False
        self._num_failures = 0
        self._num_deaths = 0

    async def pause(self) -> None:
        """Before another attempt, for a pool to come back."""
        if self._num_failures > 1:
            await asyncio.sleep(min(_MAX_PAUSE_S, 2.0 ** (self._num_failures - 2)))

    @asynccontextmanager
    async def placing(self) -> AsyncIterator[None]:
        """Around one attempt. A suspect waits here for the others. It has entered the queue's room
        before: who has the probation must never wait for room that suspects hold.
        """
        if self._num_deaths:
            await self._probation.acquire()
            self._is_on_probation = True
        try:
            yield
        finally:
            self._end_probation()

    def progressed(self) -> None:
        """It decodes: all that was before is forgiven. The token of a prefill does not count, or a
        request would go round between a pool that works and one that does not.
        """
        self._num_failures = self._num_deaths = 0
        self._end_probation()

    def failed(self, error: TandemError) -> None:
        """Raises when this was the last attempt."""
        self._num_failures += 1
        self._num_deaths += isinstance(error, EngineDied)
        if self._num_deaths == MAX_DEATHS:
            raise EngineFault(
                f"given up: {MAX_DEATHS} engines died while they computed this request; the last "
                f"one: {error}"
            ) from error
        if self._num_failures == self._max_attempts or isinstance(error, ShuttingDown):
            raise error

    def _end_probation(self) -> None:
        if self._is_on_probation:
            self._is_on_probation = False
            self._probation.release()
