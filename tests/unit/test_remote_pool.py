"""Which server of a pool gets a call: found by name, left out while it does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import msgspec
import pytest

from pool_servers import Outputs, Servicer, TritonError, grpc_server
from tandem.addresses import ServerAddress
from tandem.errors import EngineFault, InvalidRequest, TandemError, Unavailable
from tandem.orchestrator.remote_pool import RemotePool, resolve
from tandem.orchestrator.remote_server import Probing
from tandem.types import Role

NAME = ServerAddress("decode.svc", 8001)
QUICK = Probing(every_s=0.02, timeout_s=0.2, max_pause_s=0.1)
SLOW = Probing(every_s=60.0, max_pause_s=60.0)


class Server:
    """A decode server whose workers are named after it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_calls = 0
        self.error: Exception | None = None
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.servicer = Servicer(self)
        self.port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def __call__(self, model: str, request: bytes, handle: bytes) -> Outputs:
        self.num_calls += 1
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return msgspec.msgpack.encode({"worker": f"decode_0_0@{self.name}"}), b""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with grpc_server(self.servicer, self.port) as self.port:
            yield


class Names:
    """What the name resolves to."""

    def __init__(self) -> None:
        self.addresses: set[str] = set()
        self.error: OSError | None = None
        self.num_asked = 0

    async def __call__(self, address: ServerAddress) -> set[str]:
        self.num_asked += 1
        if self.error is not None:
            raise self.error
        return set(self.addresses)


@asynccontextmanager
async def pool_of(
    *servers: Server, probing: Probing = QUICK, names: Names | None = None
) -> AsyncIterator[RemotePool]:
    """The servers run, and the pool knows them."""
    async with AsyncExitStack() as running:
        for server in servers:
            await running.enter_async_context(server.running())
        names = names or Names()
        names.addresses |= {server.address for server in servers}
        pool = RemotePool(
            Role.DECODE, [NAME], resolve=names, resolve_every_s=0.02, probing=probing
        )
        await pool.start()
        try:
            yield pool
        finally:
            await pool.stop()


async def call(pool: RemotePool, worker: str | None = None) -> str:
    """The server that took it."""
    server = pool.choose(worker)
    result, _ = await asyncio.wait_for(server.call(b"spec", b""), 5)
    return str(msgspec.msgpack.decode(result)["worker"]).partition("@")[2]


async def until(is_true: Callable[[], Any]) -> None:
    async with asyncio.timeout(5):
        while not is_true():
            await asyncio.sleep(0.005)


def answers(pool: RemotePool) -> bool:
    try:
        pool.choose(None)
    except Unavailable:
        return False
    return True


async def test_every_server_is_tried_once_then_the_wanted_worker_is_found() -> None:
    async with pool_of(Server("a"), Server("b"), Server("c"), probing=SLOW) as pool:
        assert {await call(pool, "decode_0_0@a") for _ in range(3)} == {"a", "b", "c"}
        for name in "bacab":
            assert await call(pool, f"decode_0_0@{name}") == name


async def test_without_a_wish_the_server_with_the_fewest_calls_is_taken() -> None:
    a, b = Server("a"), Server("b")
    async with pool_of(a, b, probing=SLOW) as pool:
        assert {await call(pool) for _ in range(2)} == {"a", "b"}
        a.may_answer.clear()
        waiting = asyncio.create_task(call(pool, "decode_0_0@a"))
        await until(lambda: a.num_calls == 2)
        assert [await call(pool) for _ in range(3)] == ["b"] * 3
        a.may_answer.set()
        assert await waiting == "a"


async def test_a_lost_server_is_left_out_until_it_answers_again() -> None:
    a, b, names = Server("a"), Server("b"), Names()
    async with pool_of(b, names=names) as pool, AsyncExitStack() as life:
        assert await call(pool) == "b"
        await life.enter_async_context(a.running())
        names.addresses.add(a.address)
        await until(lambda: len(pool.servers) == 2)
        assert await call(pool) == "a"
        await life.aclose()
        await until(lambda: not all(s.is_healthy for s in pool.servers))
        assert [await call(pool, "decode_0_0@a") for _ in range(3)] == ["b"] * 3
        async with a.running():
            await until(lambda: all(s.is_healthy for s in pool.servers))
            assert await call(pool) == "a", "it may have come back with other workers"


async def test_a_call_that_finds_nobody_leaves_the_server_out_at_once() -> None:
    a = Server("a")
    async with pool_of(a, probing=SLOW) as pool:
        a.error = TritonError(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        with pytest.raises(Unavailable, match=f"decode server {a.address}: Socket closed"):
            await call(pool)
        with pytest.raises(Unavailable, match=f"no decode server answers .{a.address}."):
            await call(pool)
        assert a.num_calls == 1


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (InvalidRequest("prompt_ids", "empty"), InvalidRequest),
        (TritonError(grpc.StatusCode.INVALID_ARGUMENT, "unexpected shape"), InvalidRequest),
        (EngineFault("a bug"), EngineFault),
        (Unavailable("the engine is full"), Unavailable),
    ],
    ids=str,
)
async def test_what_an_engine_answers_never_counts_against_its_server(
    error: Exception, raised: type[TandemError]
) -> None:
    a = Server("a")
    async with pool_of(a, probing=SLOW) as pool:
        a.error = error
        for _ in range(3):
            with pytest.raises(raised):
                await call(pool)
        a.error = None
        assert await call(pool) == "a"


async def test_a_server_without_its_model_is_left_out() -> None:
    a = Server("a")
    async with pool_of(a) as pool:
        a.servicer.is_ready = False
        await until(lambda: not answers(pool))
        a.servicer.is_ready = True
        await until(lambda: answers(pool))


async def test_calls_to_a_frozen_server_end() -> None:
    a = Server("a")
    async with pool_of(a) as pool:
        a.may_answer.clear()
        waiting = asyncio.create_task(call(pool))
        await until(lambda: a.num_calls == 1)
        a.servicer.is_deaf = True
        with pytest.raises(Unavailable, match="gives no sign of life"):
            await waiting


async def test_a_name_is_looked_up_again_and_again() -> None:
    a, b, names = Server("a"), Server("b"), Names()
    async with b.running(), pool_of(a, names=names) as pool:
        assert await call(pool) == "a"
        names.addresses = {b.address}
        await until(lambda: [s.address for s in pool.servers] == [b.address])
        assert await call(pool, "decode_0_0@a") == "b"
        names.error = OSError("name service is down")
        asked = names.num_asked
        await until(lambda: names.num_asked > asked + 1)
        assert await call(pool) == "b", "what was known stays"


async def test_a_server_that_left_the_name_ends_its_calls() -> None:
    a, names = Server("a"), Names()
    async with pool_of(a, names=names) as pool:
        a.may_answer.clear()
        waiting = asyncio.create_task(call(pool))
        await until(lambda: a.num_calls == 1)
        names.addresses.clear()
        await until(lambda: not answers(pool))
        a.may_answer.set()
        assert await waiting == "a"


async def test_a_literal_address_is_its_own() -> None:
    assert await resolve(ServerAddress("127.0.0.1", 8001)) == {"127.0.0.1:8001"}
    assert await resolve(ServerAddress("::1", 8001)) == {"[::1]:8001"}
