"""One contract for both links: to the pools of this server, and to those of others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest

from pool_servers import Outputs, Servicer, TritonError, fake_bls, grpc_server
from tandem import wire
from tandem.addresses import ServerAddress
from tandem.errors import (
    EngineDied,
    EngineFault,
    InvalidHandle,
    InvalidRequest,
    PullFailed,
    RequestCancelled,
    TandemError,
    Unavailable,
)
from tandem.orchestrator.call_places import CallPlaces
from tandem.orchestrator.grpc_link import GRPCLink
from tandem.orchestrator.link import TritonLink
from tandem.orchestrator.remote_pool import RemotePool
from tandem.types import Role, SamplingParams

HANDLE = b"\x00\xffhandle\x00"
SPEC = wire.SequenceSpec(
    sequence_id="s", reply_to="llm_0_0", prompt_ids=(1, 2), sampling=SamplingParams(max_tokens=2)
)
REPLY = wire.PrefillReply(
    worker="prefill_0_0",
    token=wire.TokenEvent("s", 0, 7, -0.5),
    num_cached_tokens=1,
    queue_s=0.1,
    prefill_s=0.2,
)
ADMITTED = wire.Admitted(worker="decode_0_0", incarnation="aa", pulled_bytes=3)


class Models:
    """Both pools; ``script`` is done before each answers."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, bytes, bytes]] = []
        self.script: Callable[[], Awaitable[None]] | None = None
        self.num_done = 0

    async def __call__(self, name: str, request: bytes, handle: bytes) -> Outputs:
        self.calls.append((name, request, handle))
        if self.script is not None:
            await self.script()
        self.num_done += 1
        if name == "prefill":
            return wire.encode(REPLY), HANDLE
        return wire.encode(ADMITTED), b""

    def fail(self, error: Exception) -> None:
        async def script() -> None:
            raise error

        self.script = script


@pytest.fixture
def models() -> Models:
    return Models()


@pytest.fixture(params=["bls", "grpc"])
async def link(
    request: pytest.FixtureRequest, models: Models, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[TritonLink]:
    if request.param == "bls":
        fake_bls(monkeypatch, models)
        from tandem.triton_backend.bls_link import BLSLink

        yield BLSLink(CallPlaces(4))
        return
    async with grpc_server(Servicer(models)) as port:
        servers = [ServerAddress("127.0.0.1", port)]
        link = GRPCLink({role: RemotePool(role, servers) for role in Role})
        await link.start()
        yield link
        await link.stop()


async def test_a_prefill_brings_a_token_and_a_handle(link: TritonLink, models: Models) -> None:
    assert await link.prefill(SPEC, None) == (REPLY, HANDLE)
    assert models.calls == [("prefill", wire.encode(SPEC), b"")]


@pytest.mark.parametrize("handle", [b"", HANDLE])
async def test_a_decode_is_admitted(link: TritonLink, models: Models, handle: bytes) -> None:
    assert await link.decode(SPEC, handle, "decode_0_0") == ADMITTED
    assert models.calls == [("decode", wire.encode(SPEC), handle)]


@pytest.mark.parametrize(
    ("answer", "raised", "text"),
    [
        (InvalidRequest("prompt_ids", "empty"), InvalidRequest, "prompt_ids: empty"),
        (Unavailable("full"), Unavailable, "full"),
        (EngineDied("exited with -9"), EngineDied, "exited with -9"),
        (PullFailed("lease expired"), Unavailable, "lease expired"),
        (RequestCancelled("cancelled before"), Unavailable, "cancelled before"),
        (EngineFault("a\nbug"), EngineFault, "a\nbug"),
        (InvalidHandle("forged"), Unavailable, "the KV handle was refused: handle: forged"),
        (TritonError(grpc.StatusCode.UNAVAILABLE, "no such model"), Unavailable, "no such model"),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_an_error_is_raised_as_what_it_was(
    link: TritonLink, models: Models, answer: Exception, raised: type[TandemError], text: str
) -> None:
    models.fail(answer)
    with pytest.raises(TandemError, match=text) as caught:
        await link.decode(SPEC, HANDLE, None)
    assert type(caught.value) is raised


async def test_calls_run_side_by_side(link: TritonLink, models: Models) -> None:
    together = asyncio.Barrier(3)

    async def wait_for_the_others() -> Any:
        await together.wait()

    models.script = wait_for_the_others
    calls = (link.prefill(SPEC, None), link.decode(SPEC, b"", None), link.decode(SPEC, b"", None))
    assert (await asyncio.wait_for(asyncio.gather(*calls), 5))[1:] == [ADMITTED, ADMITTED]


async def test_a_cancelled_call_goes_on_behind_it(link: TritonLink, models: Models) -> None:
    began, may_end = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        began.set()
        await may_end.wait()

    models.script = wait
    call = asyncio.create_task(link.decode(SPEC, HANDLE, None))
    await asyncio.wait_for(began.wait(), 5)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    may_end.set()
    assert await asyncio.wait_for(link.decode(SPEC, HANDLE, None), 5) == ADMITTED
    assert models.num_done == 2
