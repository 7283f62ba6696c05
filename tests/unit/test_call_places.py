"""Calls are bounded per pool, by the time they run and not by the time somebody waits for them."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from tandem.errors import Unavailable
from tandem.orchestrator.call_places import CallPlaces
from tandem.types import Role


class Calls:
    """Calls that end when they are told to."""

    def __init__(self) -> None:
        self.running: list[asyncio.Future[str]] = []

    async def __call__(self) -> str:
        self.running.append(asyncio.get_running_loop().create_future())
        return await self.running[-1]


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_each_pool_has_places_of_its_own() -> None:
    places, prefills, decodes = CallPlaces(2), Calls(), Calls()
    waiting = [asyncio.create_task(places.run(Role.PREFILL, prefills)) for _ in range(5)]
    await settle()
    assert len(prefills.running) == 2
    decode = asyncio.create_task(places.run(Role.DECODE, decodes))
    await settle()
    decodes.running[0].set_result("decoded")
    assert await decode == "decoded"
    for index in range(5):
        prefills.running[index].set_result("prefilled")
        await settle()
        assert len(prefills.running) == min(5, index + 3)
    assert await asyncio.gather(*waiting) == ["prefilled"] * 5


async def test_a_cancelled_caller_keeps_its_place_until_the_call_ends() -> None:
    places, calls = CallPlaces(1), Calls()
    first = asyncio.create_task(places.run(Role.DECODE, calls))
    await settle()
    second = asyncio.create_task(places.run(Role.DECODE, calls))
    first.cancel()
    await settle()
    assert first.cancelled() and len(calls.running) == 1
    calls.running[0].set_exception(Unavailable("too late for anybody"))
    await settle()
    assert len(calls.running) == 2
    calls.running[1].set_result("done")
    assert await second == "done"


async def test_who_is_cancelled_while_waiting_takes_no_place() -> None:
    places, calls = CallPlaces(1), Calls()
    first = asyncio.create_task(places.run(Role.DECODE, calls))
    await settle()
    second = asyncio.create_task(places.run(Role.DECODE, calls))
    await settle()
    second.cancel()
    await settle()
    calls.running[0].set_exception(Unavailable("down"))
    with pytest.raises(Unavailable):
        await first
    third = asyncio.create_task(places.run(Role.DECODE, calls))
    await settle()
    assert len(calls.running) == 2
    calls.running[1].set_result("done")
    assert await third == "done"


async def test_an_error_keeps_nothing_of_its_caller_alive() -> None:
    """A request's response sender above all: as long as one lives, Triton cannot unload llm."""

    class Sender:
        pass

    async def fail() -> str:
        raise Unavailable("down")

    async def serve(sender: Sender) -> None:
        with pytest.raises(Unavailable):
            await call(sender)

    async def call(sender: Sender) -> str:
        return await CallPlaces(1).run(Role.PREFILL, fail)

    sender = Sender()
    reference = weakref.ref(sender)
    gc.disable()
    try:
        await serve(sender)
        del sender
        await settle()
        assert reference() is None
    finally:
        gc.enable()
