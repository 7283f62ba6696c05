"""Engines die or stop under load: every stream goes on to its right end, and nothing leaks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from oracle import random_prompt
from running_server import held_blocks, metric, serve, wait_until
from server_processes import engine, processes
from tandem_cli.server import TandemServer
from tandem_client import Completion, TandemClient

NUM_STREAMS = 8
MAX_TOKENS = 200
ANSWERED_WITHIN_S = 60.0
BACK_WITHIN_S = 60.0  # the load time, and a backoff that grows with each death
SETTINGS = ("dtype=float32", "max_model_len=512", "kv_cache_mb=32")
PARAMS: dict[str, Any] = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "temperature": 0}
SAMPLING: list[dict[str, Any]] = [  # of each stream; all of it must survive a failover
    {},
    {"temperature": 0.9, "seed": 1, "top_p": 0.9, "logprobs": 1},
    {"repetition_penalty": 1.3, "logprobs": 1},
    {"temperature": 0.7, "seed": 2, "stop": ["the", "zz"]},
    {"temperature": 1.0, "seed": 3, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {},
    {"temperature": 1.0, "seed": 4, "min_tokens": MAX_TOKENS - 20, "ignore_eos": False},
    {"temperature": 1.0, "seed": 5, "top_k": 40, "min_p": 0.01},
]
Disturbance = Callable[[], AbstractContextManager[None]]


@pytest.fixture(scope="module")
def server(tiny_model_dir: Callable[..., Path]) -> Iterator[TandemServer]:
    # Whoever takes the prefill pool then waits for a place, its KV behind a handle.
    settings = (*SETTINGS, f"decode.max_num_seqs={NUM_STREAMS // 2}")
    with serve(tiny_model_dir("llama"), settings=settings) as server:
        yield server


def prompt(run: int, index: int) -> list[int]:
    """Another one in every run, so that none is cached; half of them take the prefill pool."""
    return random_prompt(200 if index % 2 else 40, 270, seed=1000 * run + index)


def answers(server: TandemServer, run: int, disturb: Disturbance = nullcontext) -> list[Completion]:
    """The answers of streams that are sent, all at once, where ``disturb`` yields."""
    url = f"grpc://{server.grpc_address}"
    with (
        TandemClient(url, timeout=ANSWERED_WITHIN_S) as client,
        ThreadPoolExecutor(NUM_STREAMS) as threads,
    ):

        def answer(index: int) -> Completion:
            return client.stream(
                input_ids=prompt(run, index),
                return_output_ids=True,
                **(PARAMS | SAMPLING[index]),
            ).result()

        with disturb():
            pending = [threads.submit(answer, index) for index in range(NUM_STREAMS)]
        return [future.result() for future in pending]


def assert_survives(server: TandemServer, run: int, disturb: Disturbance) -> list[Completion]:
    """All streams end as they do without the disturbance, and the server is as before."""
    disturbed = answers(server, run, disturb)
    wait_until(lambda: is_up(server), BACK_WITHIN_S)
    wait_until(lambda: is_idle(server), 3)
    expected = answers(server, run)
    for got, wanted in zip(disturbed, expected, strict=True):
        assert (got.output_ids, got.text) == (wanted.output_ids, wanted.text)
        assert got.finish_reason == wanted.finish_reason
        assert got.logprobs == pytest.approx(wanted.logprobs, abs=1e-3)
        assert wanted.timings.retries == 0
    wait_until(lambda: is_idle(server), 3)
    return disturbed


def is_up(server: TandemServer) -> bool:
    workers = [name for name in processes(server) if name.startswith(("prefill_", "decode_"))]
    return metric(server, "tandem_engine_up") == len(workers)


def is_idle(server: TandemServer) -> bool:
    names = ("tandem_requests_live", "tandem_running", "tandem_waiting", "tandem_kv_leases")
    return held_blocks(server) == 0 and not any(metric(server, name) for name in names)


def wait_for_streams(server: TandemServer) -> None:
    """Until those are decoded that do not need the prefill pool."""
    wait_until(lambda: metric(server, "tandem_running", role="decode") >= NUM_STREAMS / 2, 30)


def wait_for_tokens(server: TandemServer, count: int) -> None:
    before = metric(server, "tandem_output_tokens_total")
    wait_until(lambda: metric(server, "tandem_output_tokens_total") >= before + count, 30)


def kill_engine(server: TandemServer, worker: str) -> None:
    """Returns when its death is known."""
    engine(server, worker).kill()
    wait_until(lambda: metric(server, "tandem_engine_up", worker=worker) == 0)


def restarts(server: TandemServer, worker: str) -> float:
    return metric(server, "tandem_engine_restarts_total", worker=worker)


@contextmanager
def suspended(server: TandemServer, worker: str) -> Iterator[None]:
    process = engine(server, worker)
    process.suspend()
    try:
        yield
    finally:
        with suppress(psutil.NoSuchProcess):
            process.resume()


def test_the_decode_engine_dies_and_dies_again(server: TandemServer) -> None:
    @contextmanager
    def kill_twice() -> Iterator[None]:
        yield
        wait_for_streams(server)
        kill_engine(server, "decode_0_0")
        wait_until(lambda: is_up(server), BACK_WITHIN_S)
        wait_for_streams(server)
        wait_for_tokens(server, 40)  # who has none yet would lose a second engine
        kill_engine(server, "decode_0_0")

    disturbed = assert_survives(server, 1, kill_twice)
    assert restarts(server, "decode_0_0") == 2
    assert sum(answer.timings.retries for answer in disturbed) >= NUM_STREAMS


def test_the_prefill_engine_dies_with_prompts_in_it(server: TandemServer) -> None:
    @contextmanager
    def kill() -> Iterator[None]:
        with suspended(server, "prefill_0_0"):
            yield
            wait_for_streams(server)
            wait_until(lambda: metric(server, "tandem_requests_live") == NUM_STREAMS)
            kill_engine(server, "prefill_0_0")

    disturbed = assert_survives(server, 2, kill)
    assert restarts(server, "prefill_0_0") == 1
    assert sum(answer.timings.retries for answer in disturbed) >= NUM_STREAMS / 2


def test_the_prefill_engine_dies_before_its_handles_are_used(server: TandemServer) -> None:
    @contextmanager
    def kill() -> Iterator[None]:
        yield
        wait_until(lambda: metric(server, "tandem_kv_leases") >= 2)
        kill_engine(server, "prefill_0_0")

    assert_survives(server, 3, kill)
    assert restarts(server, "prefill_0_0") == 2


def test_the_decode_engine_stops_for_two_seconds(server: TandemServer) -> None:
    """Too short to count as dead: the streams pause, nothing is computed twice."""

    @contextmanager
    def pause() -> Iterator[None]:
        yield
        wait_for_streams(server)
        with suspended(server, "decode_0_0"):
            time.sleep(2)

    disturbed = assert_survives(server, 4, pause)
    assert max(answer.timings.retries for answer in disturbed) == 0


def test_both_engines_die_at_once(server: TandemServer) -> None:
    @contextmanager
    def kill() -> Iterator[None]:
        yield
        wait_for_streams(server)
        for process in [engine(server, worker) for worker in ("prefill_0_0", "decode_0_0")]:
            process.kill()

    assert_survives(server, 5, kill)


# ---- with two decode instances ---------------------------------------------------------------


@pytest.fixture(scope="module")
def two_decoders(tiny_model_dir: Callable[..., Path]) -> Iterator[TandemServer]:
    with serve(tiny_model_dir("llama"), settings=SETTINGS, decode_instances=2) as server:
        yield server


def test_streams_of_a_dead_engine_go_on_at_another(two_decoders: TandemServer) -> None:
    @contextmanager
    def kill() -> Iterator[None]:
        yield
        wait_for_streams(two_decoders)
        kill_engine(two_decoders, "decode_0_0")

    disturbed = assert_survives(two_decoders, 6, kill)
    moved = [answer for answer in disturbed if answer.timings.retries]
    assert moved
    assert {answer.timings.decode_worker for answer in moved} == {"decode_0_1"}


def test_nobody_waits_for_an_engine_that_restarts_while_another_is_idle(
    two_decoders: TandemServer,
) -> None:
    kill_engine(two_decoders, "decode_0_1")
    with TandemClient(f"grpc://{two_decoders.grpc_address}") as client:
        workers = [client.generate("hello", max_tokens=2).timings.decode_worker for _ in range(9)]
    assert metric(two_decoders, "tandem_engine_up", worker="decode_0_1") == 0, "the test's premise"
    assert set(workers) == {"decode_0_0"}
    wait_until(lambda: is_up(two_decoders), BACK_WITHIN_S)


def test_an_idle_engine_dies(two_decoders: TandemServer) -> None:
    kill_engine(two_decoders, "prefill_0_0")
    assert_survives(two_decoders, 7, nullcontext)
    assert restarts(two_decoders, "prefill_0_0") == 1
