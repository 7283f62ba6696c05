"""A client goes away in every state of its request: everything it held is free within a second."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from running_server import held_blocks, metric, serve, wait_until
from soak_load import ENDLESS_CLIENT
from tandem_cli.server import TandemServer
from tandem_client import AsyncTandemClient
from tandem_client.request import GenerateRequest

FREE_WITHIN_S = 1.0
METRIC_DELAY_S = 0.4  # engine to stub 0.2 s, stub to /metrics 0.1 s, and the scrape
REMOTE_FROM = 300  # tokens: shorter prompts are prefilled at decode
SETTINGS = (
    "dtype=float32",
    "max_num_batched_tokens=32",  # a cancel waits for the end of a step, so keep it short
    f"llm.remote_prefill_min_tokens={REMOTE_FROM}",
    "prefill.max_num_seqs=32",
    "decode.max_num_seqs=1",  # one more has to wait with its KV behind a handle
)
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]


@dataclass(frozen=True)
class State:
    """Where a request is when its client leaves; ``ahead`` are prompts that keep it there."""

    num_prompt_tokens: int
    is_reached: Callable[[TandemServer], bool]
    ahead: tuple[int, ...] = ()


def is_queued(server: TandemServer) -> bool:
    return metric(server, "tandem_waiting", role="prefill") >= 1


def is_prefilling(server: TandemServer) -> bool:
    return metric(server, "tandem_kv_blocks", role="prefill", state="used") > 0


def is_waiting_for_its_pull(server: TandemServer) -> bool:
    return metric(server, "tandem_kv_leases", role="prefill") == 1


def is_decoding(server: TandemServer) -> bool:
    is_running = metric(server, "tandem_running", role="decode") == 1
    return is_running and metric(server, "tandem_waiting_tokens", role="decode") == 0


def is_prefilling_locally(server: TandemServer) -> bool:
    return metric(server, "tandem_waiting_tokens", role="decode") > 0


STATES = {
    "queued": State(1200, is_queued, ahead=(900,) * 3),
    "prefilling": State(1800, is_prefilling),
    "handed over": State(REMOTE_FROM, is_waiting_for_its_pull, ahead=(8,)),
    "decoding": State(8, is_decoding),
    "prefilling locally": State(REMOTE_FROM - 50, is_prefilling_locally),
}


@pytest.fixture(scope="module")
def server(smollm2: Path) -> Iterator[TandemServer]:
    with serve(smollm2, settings=SETTINGS) as server:
        yield server


@pytest.fixture(scope="module")
def prompts() -> Callable[[int], tuple[int, ...]]:
    """Random prompts of a length, so that none is found in a prefix cache."""
    rng = random.Random(1)
    return lambda length: tuple(rng.randrange(1000, 40_000) for _ in range(length))


@asynccontextmanager
async def client_of(server: TandemServer, protocol: str) -> AsyncIterator[AsyncTandemClient]:
    url = server.http_url if protocol == "http" else f"grpc://{server.grpc_address}"
    async with AsyncTandemClient(url, timeout=60) as client:
        yield client


def send(
    client: AsyncTandemClient, prompt: tuple[int, ...], *, stream: bool = True
) -> asyncio.Task[object]:
    """A request that decodes for as long as it is let; cancelling the task is what a client that
    goes away does: RST_STREAM in gRPC, the end of the connection in HTTP.
    """
    request = GenerateRequest(
        stream=stream, input_ids=prompt, max_tokens=2000 - len(prompt), ignore_eos=True
    )
    return asyncio.create_task(client.send(request).result())


async def leave(*tasks: asyncio.Task[object]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def reach(server: TandemServer, state: State, task: asyncio.Task[object]) -> None:
    def is_there() -> bool:
        assert not task.done(), task.result()
        return state.is_reached(server)

    await asyncio.to_thread(wait_until, is_there, 20)


async def free_within(server: TandemServer, is_free: Callable[[], bool]) -> None:
    await asyncio.to_thread(wait_until, is_free, FREE_WITHIN_S + METRIC_DELAY_S)


async def until_live(server: TandemServer, count: int) -> None:
    await asyncio.to_thread(wait_until, lambda: metric(server, "tandem_requests_live") == count)


async def idle_within_a_second(server: TandemServer) -> None:
    try:
        await free_within(server, lambda: not busy(server))
    except AssertionError:
        raise AssertionError(f"still there: {busy(server)}") from None


def busy(server: TandemServer) -> dict[str, float]:
    """Every gauge of something that a request holds, unless it is zero."""
    names = ("tandem_requests_live", "tandem_running", "tandem_waiting", "tandem_kv_leases")
    found = {name: metric(server, name) for name in names}
    found["held blocks"] = held_blocks(server)
    return {name: value for name, value in found.items() if value}


def num_cancelled(server: TandemServer) -> float:
    return metric(server, "tandem_requests_total", outcome="cancelled")


async def assert_serves(server: TandemServer) -> None:
    async with client_of(server, "grpc") as client:
        answer = await client.generate(messages=CAPITAL, max_tokens=20, temperature=0)
    assert answer.text == "The capital of France is Paris."
    await asyncio.sleep(METRIC_DELAY_S)  # or the next test takes this request for its own
    assert not busy(server)


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
async def test_a_cancelled_grpc_request_frees_everything_within_a_second(
    server: TandemServer, prompts: Callable[[int], tuple[int, ...]], state: State, stream: bool
) -> None:
    num_before = num_cancelled(server)
    async with client_of(server, "grpc") as client:
        ahead = [send(client, prompts(length)) for length in state.ahead]
        if ahead:
            await asyncio.to_thread(wait_until, lambda: held_blocks(server) > 0)
        task = send(client, prompts(state.num_prompt_tokens), stream=stream)
        await reach(server, state, task)
        await leave(task)
        await free_within(server, lambda: num_cancelled(server) == num_before + 1)
        assert not any(other.done() for other in ahead), "only the one that left is cancelled"
        if state.is_reached is is_waiting_for_its_pull:
            await free_within(server, lambda: not is_waiting_for_its_pull(server))
        await leave(*ahead)
        await idle_within_a_second(server)
    assert num_cancelled(server) == num_before + 1 + len(ahead)
    await assert_serves(server)


async def test_a_closed_http_stream_frees_everything_within_a_second(
    server: TandemServer, prompts: Callable[[int], tuple[int, ...]]
) -> None:
    num_before = num_cancelled(server)
    async with client_of(server, "http") as client:
        task = send(client, prompts(8))
        await reach(server, STATES["decoding"], task)
        await leave(task)
        await idle_within_a_second(server)
    assert num_cancelled(server) == num_before + 1
    await assert_serves(server)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_a_killed_client_frees_everything_within_a_second(
    server: TandemServer, protocol: str
) -> None:
    num_before = num_cancelled(server)
    url = server.http_url if protocol == "http" else f"grpc://{server.grpc_address}"
    client = await asyncio.create_subprocess_exec(sys.executable, "-c", ENDLESS_CLIENT, url)
    await asyncio.to_thread(wait_until, lambda: is_decoding(server), 20)
    client.kill()
    await client.wait()
    await idle_within_a_second(server)
    assert num_cancelled(server) == num_before + 1
    await assert_serves(server)


@pytest.mark.parametrize("length", [REMOTE_FROM, REMOTE_FROM - 50], ids=["remote", "local"])
async def test_triton_notices_a_closed_http_connection_when_it_writes_to_it(
    server: TandemServer, prompts: Callable[[int], tuple[int, ...]], length: int
) -> None:
    """So before the first token nothing is freed; with that token everything is."""
    num_before = num_cancelled(server)
    num_first_tokens = metric(server, "tandem_ttft_seconds_count")

    def has_a_first_token() -> bool:
        return metric(server, "tandem_ttft_seconds_count") > num_first_tokens

    async with client_of(server, "http") as client:
        task = send(client, prompts(length))
        await asyncio.to_thread(wait_until, lambda: held_blocks(server) > 0)
        await leave(task)
    await asyncio.to_thread(wait_until, has_a_first_token, 30)
    await idle_within_a_second(server)
    assert num_cancelled(server) == num_before + 1
    await assert_serves(server)


async def test_a_closed_http_connection_without_a_stream_is_served_to_its_end(
    server: TandemServer, prompts: Callable[[int], tuple[int, ...]]
) -> None:
    """Triton sees such a client go only when it writes the one response."""
    num_done = metric(server, "tandem_requests_total", outcome="length")

    def is_done() -> bool:
        return metric(server, "tandem_requests_total", outcome="length") > num_done

    async with client_of(server, "http") as client:
        request = GenerateRequest(
            stream=False, input_ids=prompts(8), max_tokens=40, ignore_eos=True
        )
        task = asyncio.create_task(client.send(request).result())
        await reach(server, STATES["decoding"], task)
        await leave(task)
    await asyncio.to_thread(wait_until, is_done, 20)
    await idle_within_a_second(server)
    await assert_serves(server)


async def test_cancelled_calls_in_the_queue_of_decode_leave_prefill_its_threads(
    server: TandemServer, prompts: Callable[[int], tuple[int, ...]]
) -> None:
    """The calls themselves stay in Triton's queue, each with a thread, until decode has room."""
    async with client_of(server, "grpc") as client:
        occupant = send(client, prompts(8))
        await reach(server, STATES["decoding"], occupant)
        for _ in range(3):
            queued = [send(client, prompts(8)) for _ in range(12)]
            await until_live(server, 1 + len(queued))
            await leave(*queued)
            await until_live(server, 1)
        request = GenerateRequest(stream=True, input_ids=prompts(REMOTE_FROM), max_tokens=9)
        async with asyncio.timeout(15), client.send(request) as stream:
            await anext(stream)
            assert not occupant.done(), "the test's premise"
        await leave(occupant)
    await idle_within_a_second(server)
    await assert_serves(server)


async def test_50_requests_cancelled_at_random_times(tiny_server: TandemServer) -> None:
    """So fast a model spends little time in each state, so all of them are hit, also the pull."""
    rng = random.Random(20)
    num_before = num_cancelled(tiny_server)
    async with client_of(tiny_server, "grpc") as client:

        async def run(delay_s: float) -> bool:
            prompt = tuple(rng.randrange(3, 200) for _ in range(rng.choice((16, 200, 400))))
            request = GenerateRequest(
                stream=True, input_ids=prompt, max_tokens=500 - len(prompt), ignore_eos=True
            )
            try:
                await asyncio.wait_for(client.send(request).result(), delay_s)
            except TimeoutError:
                return True
            return False

        was_cancelled = await asyncio.gather(*(run(rng.uniform(0, 2.0)) for _ in range(50)))
        await idle_within_a_second(tiny_server)
        assert sum(was_cancelled) > 25
        # A request that was cancelled before Triton had it never was one.
        assert 0 < num_cancelled(tiny_server) - num_before <= sum(was_cancelled)
        answers = [await client.generate("hello the", max_tokens=9) for _ in range(2)]
    assert answers[0].text == answers[1].text
