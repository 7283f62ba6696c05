"""Fixtures of the tests against a real tritonserver; helpers are in ``running_server``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from running_server import scrape, serve
from tandem_cli.server import TandemServer
from tandem_cli.smollm2 import fetch_smollm2
from tiny_tokenizers import write_byte_level, write_sentencepiece_style

for other in ("engine", "transport"):  # for tiny_models and two_hosts
    sys.path.append(str(Path(__file__).parents[1] / other))

TOKENIZERS = {"byte_level": write_byte_level, "sentencepiece": write_sentencepiece_style}


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    """The server needs the cores; what a test computes itself is small."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return fetch_smollm2()


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a random model with a tokenizer; the same arguments give the same directory.

    The model has exactly the tokenizer's vocabulary and its EOS, unless ``overrides`` (arguments
    of ``build_tiny``) say otherwise.
    """
    from tiny_models import build_tiny

    made: dict[str, Path] = {}

    def make(family: str = "llama", tokenizer: str = "byte_level", **overrides: Any) -> Path:
        key = repr((family, tokenizer, sorted(overrides.items())))
        if key not in made:
            directory = tmp_path_factory.mktemp(family)
            TOKENIZERS[tokenizer](directory)
            vocab = json.loads((directory / "tokenizer.json").read_text())
            ids = {*vocab["model"]["vocab"].values(), *(t["id"] for t in vocab["added_tokens"])}
            generation = json.loads((directory / "generation_config.json").read_text())
            fitting = {"vocab_size": max(ids) + 1, "eos_token_id": generation["eos_token_id"]}
            made[key] = build_tiny(family, directory, **(fitting | overrides))
        return made[key]

    return make


@pytest.fixture(scope="session")
def fresh_tiny_server(
    tiny_model_dir: Callable[..., Path],
) -> Iterator[tuple[TandemServer, list[tuple[str, dict[str, str], float]]]]:
    """``tiny_server``, and its metrics before its first request."""
    settings = ("dtype=float32", "max_model_len=512", "kv_cache_mb=64")
    with serve(tiny_model_dir("llama"), settings=settings) as server:
        yield server, scrape(server)


@pytest.fixture(scope="session")
def tiny_server(fresh_tiny_server: tuple[TandemServer, Any]) -> TandemServer:
    """A tiny llama, policy length, for tests that need any server and leave it as it was."""
    return fresh_tiny_server[0]
