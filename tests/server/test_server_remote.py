"""A router, a prefill server and two decode servers on three hosts, and what a lost one costs."""

from __future__ import annotations

import importlib.util
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from oracle import Oracle, random_prompt
from serving_program import Serving, tandem_serve
from tandem_cli.runtime_dir import remove_stale
from tandem_client import Completion, TandemClient, Unavailable
from three_hosts import ADDRESSES, inside, three_hosts
from two_hosts import on_host, why_not

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.skipif(
        importlib.util.find_spec("nixl_cu12") is None, reason="NIXL is not installed (extra rdma)"
    ),
]
NUM_STREAMS = 4
MAX_TOKENS = 300
ANSWERED_WITHIN_S = 40.0
PORTS = {"prefill": ["8001"], "decode": ["8001", "8011"]}


@dataclass
class Deployed:
    """Its tests run on the router's host."""

    router: Serving
    prefill: Serving
    decodes: list[Serving]

    def client(self) -> TandemClient:
        return TandemClient(self.router.ready["http"], timeout=ANSWERED_WITHIN_S)

    def ask(self, prompt: list[int], **params: Any) -> Completion:
        with self.client() as client:
            return client.generate(
                input_ids=prompt, temperature=0, return_output_ids=True, **params
            )


@pytest.fixture(scope="module")
def deployed(tiny_model_dir: Callable[..., Path]) -> Iterator[Deployed]:
    model, secret = tiny_model_dir("llama"), secrets.token_hex(16)
    with three_hosts() as names, ExitStack() as servers:

        def start(role: str, number: int = 0, *options: str, **environ: str) -> Serving:
            given = [f"{name}={value}" for name, value in environ.items()]
            before = [*on_host(names[role]), "env", f"TANDEM_SECRET={secret}", *given]
            port = PORTS[role][number] if role in PORTS else "0"
            where = (f"--role={role}", f"--host={ADDRESSES[role]}", f"--grpc-port={port}")
            return servers.enter_context(
                tandem_serve(model, *where, "--log-level=warning", *options, before=before)
            )

        urls = {
            f"TANDEM_{role.upper()}_URLS": ",".join(f"{ADDRESSES[role]}:{port}" for port in ports)
            for role, ports in PORTS.items()
        }
        decodes = [start("decode", n, TANDEM_KV_HOST=ADDRESSES["decode"]) for n in range(2)]
        prefill = start("prefill", TANDEM_KV_HOST=ADDRESSES["prefill"])
        options = ("--policy=length", "--set=max_attempts=6")
        address = ADDRESSES["router"]
        router = start("router", 0, *options, TANDEM_STREAM_HOST=address, **urls)
        with inside(names["router"]):
            yield Deployed(router, prefill, decodes)
        assert router.stop() == 0
    remove_stale()  # of the servers that were killed


def test_a_deployment_on_three_hosts(
    deployed: Deployed, tiny_model_dir: Callable[..., Path]
) -> None:
    """One test, as what it does to the servers cannot be undone."""
    oracle = Oracle(tiny_model_dir("llama"))
    for seed, (length, path) in enumerate([(200, "remote"), (17, "local"), (150, "remote")]):
        prompt = random_prompt(length, oracle.model.config.vocab_size, seed)
        answer = deployed.ask(prompt, max_tokens=24)
        assert list(answer.output_ids) == oracle.greedy(prompt, 24)
        assert (answer.timings.path, answer.timings.retries) == (path, 0)
        if path == "remote":
            assert answer.timings.transport == "nixl" and answer.timings.kv_bytes > 0
            assert ADDRESSES["prefill"] in str(answer.timings.prefill_worker)
        assert ADDRESSES["decode"] in str(answer.timings.decode_worker)

    disturbed = streams(deployed, kill_the_busiest_decode_server)
    expected = streams(deployed)
    assert [a.output_ids for a in disturbed] == [a.output_ids for a in expected]
    assert all(len(answer.output_ids) == MAX_TOKENS for answer in expected)
    assert any(answer.timings.retries for answer in disturbed)
    assert not any(answer.timings.retries for answer in expected)

    kill(deployed.prefill)
    began_s = time.monotonic()
    with pytest.raises(Unavailable):
        deployed.ask(random_prompt(200, 270, seed=50), max_tokens=4)
    assert time.monotonic() - began_s < ANSWERED_WITHIN_S / 2
    prompt = random_prompt(30, oracle.model.config.vocab_size, seed=51)
    answer = deployed.ask(prompt, max_tokens=24)
    assert list(answer.output_ids) == oracle.greedy(prompt, 24)


def streams(deployed: Deployed, disturb: Callable[[Deployed], None] | None = None) -> Any:
    """The answers of streams, half of which take both pools; all have a token when ``disturb``
    is called."""

    def finish(index: int) -> Completion:
        prompt = random_prompt(200 if index % 2 else 40, 270, seed=100 + index)
        params = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "temperature": 0}
        with (
            deployed.client() as client,
            client.stream(input_ids=prompt, return_output_ids=True, **params) as stream,
        ):
            next(stream)
            started.append(index)
            return stream.result()

    started: list[int] = []
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        pending = [threads.submit(finish, index) for index in range(NUM_STREAMS)]
        if disturb is not None:
            deadline_s = time.monotonic() + ANSWERED_WITHIN_S
            while len(started) < NUM_STREAMS and time.monotonic() < deadline_s:
                time.sleep(0.005)
            disturb(deployed)
        return [future.result() for future in pending]


def kill_the_busiest_decode_server(deployed: Deployed) -> None:
    kill(max(deployed.decodes, key=num_running))


def num_running(server: Serving) -> float:
    text = httpx.get(server.ready["metrics"], verify=False).text
    lines = [line for line in text.splitlines() if line.startswith("tandem_running{")]
    return sum(float(line.split()[-1]) for line in lines)


def kill(server: Serving) -> None:
    """All of its processes, at once."""
    server.meet()
    server.process.kill()
    for process in server.family:
        if process.is_running():
            process.kill()
    server.process.wait()
