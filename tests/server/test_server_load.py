"""Many requests: none is lost, each gets its own text, and the server stays as it was."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from itertools import cycle

import pytest

from oracle import random_prompt
from running_server import held_blocks, metric, wait_until
from server_processes import processes
from tandem_cli.runtime_dir import SHM
from tandem_cli.server import TandemServer
from tandem_client import AsyncTandemClient, TandemClient

NUM_CONCURRENT = 200
NUM_WARM_UP, NUM_SEQUENTIAL = 100, 1000
MAX_GROWTH = 0.05
MIB = 1 << 20


def is_idle(server: TandemServer) -> bool:
    return held_blocks(server) == 0 and metric(server, "tandem_requests_live") == 0


def num_free_blocks(server: TandemServer) -> float:
    states = ("free", "cached")
    return sum(metric(server, "tandem_kv_blocks", state=state) for state in states)


async def test_200_requests_at_once(tiny_server: TandemServer) -> None:
    """Far more than an engine holds at once."""
    server = tiny_server
    prompts = [random_prompt(160 if i % 4 == 0 else 20, 270, seed=i) for i in range(NUM_CONCURRENT)]
    async with AsyncTandemClient(f"grpc://{server.grpc_address}", timeout=120) as client:

        async def answer(prompt: list[int]) -> tuple[str, str]:
            answer = await client.generate(input_ids=prompt, max_tokens=8, ignore_eos=True)
            return answer.text, answer.finish_reason

        at_once = await asyncio.gather(*(answer(prompt) for prompt in prompts))
        one_by_one = [await answer(prompt) for prompt in prompts]
    assert at_once == one_by_one
    assert len(set(at_once)) > NUM_CONCURRENT / 2, "the test's premise: texts differ"
    await asyncio.to_thread(wait_until, lambda: is_idle(server))


def test_1000_requests_leave_everything_as_it_was(tiny_server: TandemServer) -> None:
    server = tiny_server

    def in_shm() -> set[str]:
        return {path.name for path in SHM.glob(f"{server.runtime_dir.shm_prefix}*")}

    def rss() -> dict[str, int]:
        return {name: process.memory_info().rss for name, process in processes(server).items()}

    def open_files() -> dict[str, int]:
        return {name: process.num_fds() for name, process in processes(server).items()}

    with (
        TandemClient(server.http_url) as http,
        TandemClient(f"grpc://{server.grpc_address}") as grpc,
    ):
        clients = cycle((http, grpc))

        def ask(index: int) -> None:
            prompt = random_prompt(140 if index % 5 == 0 else 12, 270, seed=10_000 + index)
            answer = next(clients).generate(input_ids=prompt, max_tokens=2, ignore_eos=True)
            assert answer.num_output_tokens == 2

        for index in range(NUM_WARM_UP):
            ask(index)
        wait_until(lambda: is_idle(server))
        num_free, shm, memory, files = num_free_blocks(server), in_shm(), rss(), open_files()
        for index in range(NUM_WARM_UP, NUM_WARM_UP + NUM_SEQUENTIAL):
            ask(index)
        wait_until(lambda: is_idle(server))
        assert num_free_blocks(server) == num_free
        assert in_shm() == shm
        now = rss()
        growth = {name: (now[name] - before) / MIB for name, before in memory.items()}
        print("MiB more than after the warm-up:", {k: round(v, 1) for k, v in growth.items()})
        assert now.keys() == memory.keys()
        for name, before in memory.items():
            assert growth[name] < MAX_GROWTH * before / MIB, name
        for name, count in open_files().items():
            assert count <= files[name] + 4, name


ABRUPT_CLIENT = """
import asyncio, sys
from tandem_client import AsyncTandemClient

async def main(url):
    async with AsyncTandemClient(url) as client:
        async def read(index):
            prompt = [3 + index] * 40
            async for _ in client.stream(input_ids=prompt, max_tokens=400, ignore_eos=True):
                print(index, flush=True)
        await asyncio.gather(*(read(index) for index in range(20)))

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_a_client_with_20_streams_is_killed(tiny_server: TandemServer, scheme: str) -> None:
    server = tiny_server
    url = server.http_url if scheme == "http" else f"grpc://{server.grpc_address}"
    num_before = metric(server, "tandem_requests_total", outcome="cancelled")
    command = [sys.executable, "-c", ABRUPT_CLIENT, url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as client:
        assert client.stdout is not None
        streaming: set[str] = set()
        while len(streaming) < 20:
            line = client.stdout.readline()
            assert line, "the client ended by itself"
            streaming.add(line)
        wait_until(lambda: metric(server, "tandem_requests_live") == 20)
        client.kill()
        # One second, and the time until a metric shows it.
        wait_until(lambda: is_idle(server), 1.4)
    assert metric(server, "tandem_requests_total", outcome="cancelled") == num_before + 20
