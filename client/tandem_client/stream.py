"""The answer to one request as an iterator of chunks, blocking or asyncio."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from contextlib import aclosing, closing
from types import TracebackType
from typing import Self

from tandem_client.assembly import Assembler, Chunk, Completion
from tandem_client.errors import IncompleteStream, TandemClientError
from tandem_client.response import Response


class Stream(Iterator[Chunk]):
    """Sends its request when first read; closing it (or dropping it) cancels the request.

    A ``for`` loop over ``client.stream(...)`` closes on break; a stream kept in a variable
    needs ``with``. Not for use by two threads at once.
    """

    def __init__(self, responses: Generator[Response, None, None]) -> None:
        self._assembler = Assembler()
        self._chunks = _assemble(responses, self._assembler)

    def __next__(self) -> Chunk:
        return next(self._chunks)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._chunks.close()

    def result(self) -> Completion:
        """Reads what is left; returns the whole answer."""
        for _ in self:
            pass
        return _whole(self._assembler)


class AsyncStream(AsyncIterator[Chunk]):
    """Like Stream; cancelling the task that reads it cancels the request, too."""

    def __init__(self, responses: AsyncGenerator[Response, None]) -> None:
        self._assembler = Assembler()
        self._chunks = _assemble_async(responses, self._assembler)

    async def __anext__(self) -> Chunk:
        return await anext(self._chunks)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._chunks.aclose()

    async def result(self) -> Completion:
        """Reads what is left; returns the whole answer."""
        async for _ in self:
            pass
        return _whole(self._assembler)


# Both read on after the final response, to the end of the stream: a server that has sent it
# is about to close, and a cancellation at that moment would be counted as one.


def _assemble(
    responses: Generator[Response, None, None], assembler: Assembler
) -> Generator[Chunk, None, None]:
    with closing(responses):
        while True:
            try:
                response = next(responses, None)
            except TandemClientError as error:
                assembler.fail(error)
                return
            if response is None:
                assembler.end()
                return
            if chunk := assembler.add(response):
                yield chunk


async def _assemble_async(
    responses: AsyncGenerator[Response, None], assembler: Assembler
) -> AsyncGenerator[Chunk, None]:
    async with aclosing(responses):
        while True:
            try:
                response = await anext(responses, None)
            except TandemClientError as error:
                assembler.fail(error)
                return
            if response is None:
                assembler.end()
                return
            if chunk := assembler.add(response):
                yield chunk


def _whole(assembler: Assembler) -> Completion:
    if assembler.completion is None:
        raise IncompleteStream("the stream was closed before the final response")
    return assembler.completion
