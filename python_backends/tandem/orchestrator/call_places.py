"""How many calls to a pool may be under way at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tandem.types import Role

_T = TypeVar("_T")


class CallPlaces:
    """A call of Triton's BLS holds one of the 32 threads that responses need as well, until it
    ends, also if nobody waits for it any more. So does its place here; and each pool has places of
    its own, so that a full one leaves the other its threads.
    """

    def __init__(self, max_calls_per_pool: int) -> None:
        self._places = {role: asyncio.Semaphore(max_calls_per_pool) for role in Role}

    async def run(self, role: Role, start: Callable[[], Awaitable[_T]]) -> _T:
        """The result of ``start()``, which begins as soon as there is a place and, once begun, is
        not cancelled with its caller.
        """
        places = self._places[role]
        await places.acquire()
        call = asyncio.ensure_future(start())

        def give_back(call: asyncio.Future[_T]) -> None:
            places.release()
            if not call.cancelled():
                call.exception()  # or asyncio reports one that nobody waited for

        call.add_done_callback(give_back)
        try:
            return await asyncio.shield(call)
        finally:
            del call  # it keeps its error, whose traceback keeps this frame and all its callers'
