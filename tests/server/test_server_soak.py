"""Random requests, clients that leave and engines that die: nothing lost, leaked or wrong.

``make soak`` runs it for 20 minutes; TANDEM_SOAK_SECONDS and TANDEM_SOAK_SEED change it.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console
from rich.table import Table

from oracle import Oracle
from running_server import metric, serve, wait_until
from server_processes import processes
from soak_faults import Faults
from soak_load import ENDLESS_CLIENT, Load, Question, questions
from tandem_cli.server import TandemServer

SECONDS = float(os.environ.get("TANDEM_SOAK_SECONDS", "20"))
SEED = int(os.environ.get("TANDEM_SOAK_SEED", "1"))
CONCURRENCY = 8
NUM_QUESTIONS = 42
AT_REST_WITHIN_S = 40.0  # a lease whose puller died lasts 30 s
WORKERS = ("prefill_0_0", "decode_0_0", "decode_0_1")
GAUGES = ("tandem_requests_live", "tandem_running", "tandem_waiting", "tandem_kv_leases")
SETTINGS = ("dtype=float32", "max_model_len=512", "kv_cache_mb=8", "max_num_batched_tokens=64")
Figures = dict[str, Any]


def blocks(server: TandemServer, worker: str, *states: str) -> float:
    return sum(metric(server, "tandem_kv_blocks", worker=worker, state=s) for s in states)


def is_at_rest(server: TandemServer) -> bool:
    held = [blocks(server, worker, "used", "leased") for worker in WORKERS]
    return not any(held) and not any(metric(server, name) for name in GAUGES)


def totals(server: TandemServer) -> dict[str, float]:
    """Blocks of each engine that nobody holds."""
    return {worker: blocks(server, worker, "free", "cached") for worker in WORKERS}


def footprint(server: TandemServer) -> str:
    """Of the processes that live as long as the server."""
    found = [p for name, p in processes(server).items() if not name.startswith("engine ")]
    mib = sum(p.memory_info().rss for p in found) >> 20
    return f"{mib} MiB, {sum(p.num_fds() for p in found)} files"


async def soak(server: TandemServer, asked: list[Question], rng: random.Random) -> Figures:
    load, faults = Load(server, asked, rng), Faults(server, random.Random(SEED))
    running = asyncio.create_task(load.run(CONCURRENCY))
    await asyncio.wait([running], timeout=SECONDS)
    load.stop()
    await running
    await asyncio.to_thread(faults.stop)
    tally = load.tally
    return {
        "requests": sum(tally.fates.values()) + len(tally.lost),
        **dict(sorted(tally.fates.items())),
        "tokens of whole answers": tally.num_tokens,
        "faults": ", ".join(f"{name} {count}" for name, count in sorted(faults.done.items())),
        "engine restarts": metric(server, "tandem_engine_restarts_total"),
        "failovers of answered requests": tally.num_retries,
        "wrong": tally.wrong,
        "lost": tally.lost,
    }


def print_table(figures: Figures) -> None:
    table = Table(title=f"soak: {SECONDS:.0f} s, seed {SEED}")
    for title in ("figure", "value"):
        table.add_column(title)
    for name, value in figures.items():
        table.add_row(name, str(len(value) if isinstance(value, list) else value))
    Console(width=100).print(table)
    for name in ("wrong", "lost", "leaked"):
        for what in figures[name]:
            print(f"{name}: {what}")


@pytest.mark.timeout(SECONDS + 300)
def test_soak(tiny_model_dir: Callable[..., Path]) -> None:
    rng = random.Random(SEED)
    model = tiny_model_dir("llama")
    with serve(model, settings=SETTINGS, decode_instances=2) as server:
        asked = questions(server, NUM_QUESTIONS, rng)
        assert_greedy_ones_are_the_oracles(Oracle(model), asked)
        wait_until(lambda: is_at_rest(server))
        total, before, started = totals(server), footprint(server), time.monotonic()
        figures = asyncio.run(soak(server, asked, rng))
        figures["seconds"] = f"{time.monotonic() - started:.0f}"
        try:
            wait_until(lambda: is_at_rest(server) and totals(server) == total, AT_REST_WITHIN_S)
            leaked = {}
        except AssertionError:
            leaked = {w: total[w] - free for w, free in totals(server).items()}
            leaked |= {name: metric(server, name) for name in GAUGES}
        figures["leaked"] = [f"{name}: {value}" for name, value in leaked.items() if value]
        figures["Triton and stubs before / after"] = f"{before} / {footprint(server)}"
        print_table(figures)
        assert_a_dead_orchestrator_holds_nothing(server, total)
    # ``serve`` has asserted that no process and no file is left.
    assert (figures["wrong"], figures["lost"], figures["leaked"]) == ([], [], [])


def assert_a_dead_orchestrator_holds_nothing(server: TandemServer, total: dict[str, float]) -> None:
    """Its requests hang (``tandem serve`` would end now), but the engines drop them. Triton itself
    may abort: the process died with a lock of Triton's own.
    """
    command = [sys.executable, "-c", ENDLESS_CLIENT, *[server.http_url] * 8]
    with subprocess.Popen(command) as client:
        try:
            wait_until(lambda: metric(server, "tandem_running") > 4, 30)
            processes(server)["llm_0_0"].kill()
            wait_until(lambda: is_free_or_over(server, total), AT_REST_WITHIN_S)
        finally:
            client.kill()
            server.kill()


def is_free_or_over(server: TandemServer, total: dict[str, float]) -> bool:
    try:
        return totals(server) == total
    except httpx.TransportError:
        return server.wait(1) is not None


def assert_greedy_ones_are_the_oracles(oracle: Oracle, asked: list[Question]) -> None:
    greedy = [q for q in asked if q.params["temperature"] == 0]
    for params, answer in ((q.params, q.answer) for q in greedy):
        penalty = params.get("repetition_penalty", 1.0)
        eos = None if params["ignore_eos"] else oracle.eos
        wanted = oracle.generate(
            params["input_ids"],
            params["max_tokens"],
            eos_token_id=eos,
            repetition_penalty=penalty,
        )
        assert answer.output_ids == tuple(wanted)
