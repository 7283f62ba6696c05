"""Disaggregated generation over NIXL equals transformers' generate, and says what moved the KV."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from oracle import Oracle, random_prompt
from running_server import held_blocks, metric, serve, wait_until
from tandem_cli.server import TandemServer
from tandem_client import TandemClient

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("nixl_cu12") is None, reason="NIXL is not installed (extra rdma)"
)
SETTINGS = ("transport=nixl", "dtype=float32", "max_model_len=512", "kv_cache_mb=64")


@pytest.fixture(scope="module")
def server(tiny_model_dir: Callable[..., Path]) -> Iterator[TandemServer]:
    models = [f"{model}.{setting}" for model in ("prefill", "decode") for setting in SETTINGS]
    settings = (*models, "llm.max_model_len=512")
    with serve(tiny_model_dir("llama"), policy="always", settings=settings) as server:
        yield server


def test_tokens_over_nixl_are_those_of_transformers(
    server: TandemServer, tiny_model_dir: Callable[..., Path]
) -> None:
    oracle = Oracle(tiny_model_dir("llama"))
    with TandemClient(f"grpc://{server.grpc_address}") as client:
        for seed, length in enumerate((1, 17, 200)):
            prompt = random_prompt(length, oracle.model.config.vocab_size, seed)
            answer = client.generate(
                input_ids=prompt, max_tokens=24, temperature=0, return_output_ids=True
            )
            assert list(answer.output_ids) == oracle.greedy(prompt, 24)
            assert (answer.timings.path, answer.timings.transport) == ("remote", "nixl")
            assert answer.timings.kv_bytes > 0 and answer.timings.retries == 0
    pulls = {"name": "tandem_transfer_seconds_count", "transport": "nixl"}
    wait_until(lambda: metric(server, **pulls) == 3)
    wait_until(lambda: held_blocks(server) == 0)
