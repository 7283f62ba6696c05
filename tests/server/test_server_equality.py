"""Greedy float32 output equals transformers' generate, token for token, on the real server.

Every model is served under every policy; what transformers computed is shared by the three.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from oracle import Oracle, random_prompt
from running_server import held_blocks, serve, wait_until
from tandem_cli.repository import DEFAULT_REPOSITORY
from tandem_cli.server import TandemServer
from tandem_client import AsyncTandemClient, Completion, TandemClient

BLOCK_SIZE = 16
REMOTE_FROM = 32  # policy length: prompts with fewer uncached tokens stay local
FAMILIES = ("llama", "qwen3", "mistral", "gemma", "gpt2")
POLICIES = ("always", "never", "length")
BATCH = (1, 15, 16, 17, 33, 47, 64, 97, 5, 31, 32, 120, 2, 80, 48, 9)  # prompt lengths
SEEDED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "seed": 1234}


@dataclass(frozen=True)
class Size:
    max_model_len: int
    chunk: int
    kv_cache_mb: int

    @property
    def prompt_lengths(self) -> dict[str, int]:
        return {
            "one": 1,
            "block - 1": BLOCK_SIZE - 1,
            "block": BLOCK_SIZE,
            "block + 1": BLOCK_SIZE + 1,
            "3 chunks + 1": 3 * self.chunk + 1,
            "max": self.max_model_len - 1,
        }


TINY = Size(max_model_len=256, chunk=64, kv_cache_mb=16)
SMOLLM2 = Size(max_model_len=1024, chunk=128, kv_cache_mb=256)


@dataclass(frozen=True)
class Served:
    name: str
    policy: str
    size: Size
    server: TandemServer
    oracle: Oracle

    @property
    def is_tiny(self) -> bool:
        return self.size is TINY

    def path(self, num_uncached: int) -> str:
        """The path that a prompt must take."""
        is_remote = {"always": True, "never": False, "length": num_uncached >= REMOTE_FROM}
        return "remote" if is_remote[self.policy] else "local"

    def ask(self, prompt_ids: list[int], **params: Any) -> Completion:
        with TandemClient(f"grpc://{self.server.grpc_address}") as client:
            return client.generate(input_ids=prompt_ids, return_output_ids=True, **params)

    def ask_at_once(self, requests: list[dict[str, Any]]) -> list[Completion]:
        async def run() -> list[Completion]:
            async with AsyncTandemClient(f"grpc://{self.server.grpc_address}") as client:
                answers = (client.generate(return_output_ids=True, **r) for r in requests)
                return await asyncio.gather(*answers)

        return asyncio.run(run())

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        return random_prompt(length, self.oracle.tokenizer.vocab_size, seed)

    def prompt_before_eos(self) -> list[int]:
        if self.is_tiny:
            return self.oracle.prompt_whose_first_token(lambda token: token == self.oracle.eos)
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        chat = self.oracle.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        return self.oracle.tokenizer.encode(f"{chat}The capital of France is Paris.")

    def prompt_before_text(self) -> list[int]:
        """The first greedy token after it is printable text of its own."""
        if not self.is_tiny:
            return self.prompt(16)

        def is_text(token: int) -> bool:
            text = self.oracle.text([token])
            return text.isascii() and text.isprintable() and bool(text.strip())

        return self.oracle.prompt_whose_first_token(is_text)


@pytest.fixture(scope="module")
def oracle_of(
    smollm2: Path, tiny_model_dir: Callable[..., Path]
) -> Callable[[str], tuple[Path, Oracle]]:
    """Directory and oracle of a model; only the newest is kept."""
    kept: dict[str, tuple[Path, Oracle]] = {}

    def get(name: str) -> tuple[Path, Oracle]:
        if name not in kept:
            kept.clear()
            directory = smollm2 if name == "smollm2" else tiny_model_dir(name)
            kept[name] = (directory, Oracle(directory))
        return kept[name]

    return get


@pytest.fixture(scope="module")
def three_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model repository without the ensemble: servers start faster."""
    repository = tmp_path_factory.mktemp("models")
    for model in ("llm", "prefill", "decode"):
        shutil.copytree(DEFAULT_REPOSITORY / model, repository / model)
    return repository


@pytest.fixture(
    scope="module", params=[(m, p) for m in ("smollm2", *FAMILIES) for p in POLICIES], ids="-".join
)
def served(
    request: pytest.FixtureRequest,
    oracle_of: Callable[[str], tuple[Path, Oracle]],
    three_models: Path,
) -> Iterator[Served]:
    name, policy = request.param
    size = SMOLLM2 if name == "smollm2" else TINY
    directory, oracle = oracle_of(name)
    settings = (
        "dtype=float32",
        f"max_model_len={size.max_model_len}",
        f"kv_cache_mb={size.kv_cache_mb}",
        f"block_size={BLOCK_SIZE}",
        f"max_num_batched_tokens={size.chunk}",
        f"max_num_seqs={min(size.chunk, 64)}",
        f"remote_prefill_min_tokens={REMOTE_FROM}",
    )
    with serve(directory, policy, settings, model_repository=three_models) as server:
        yield Served(name, policy, size, server, oracle)
        wait_until(lambda: held_blocks(server) == 0)


@pytest.mark.parametrize("which", TINY.prompt_lengths)
def test_alone(served: Served, which: str) -> None:
    length = served.size.prompt_lengths[which]
    max_tokens = min(6, served.size.max_model_len - length)
    prompt = served.prompt(length)
    expected = served.oracle.greedy(prompt, max_tokens)
    answer = served.ask(prompt, max_tokens=max_tokens)
    assert answer.output_ids == tuple(expected)
    assert answer.num_input_tokens == length
    assert answer.num_output_tokens == len(expected)
    assert answer.text == served.oracle.text(expected, answer.finish_reason)
    assert answer.timings.path == served.path(length)


def test_mixed_batch_of_16(served: Served) -> None:
    prompts = [served.prompt(length, seed=1) for length in BATCH]
    max_tokens = [1 + i % 8 for i in range(len(BATCH))]
    requests = [{"input_ids": p, "max_tokens": m} for p, m in zip(prompts, max_tokens, strict=True)]
    answers = served.ask_at_once(requests)
    for prompt, count, answer in zip(prompts, max_tokens, answers, strict=True):
        assert answer.output_ids == tuple(served.oracle.greedy(prompt, count))
        assert answer.timings.path == served.path(len(prompt))
    if served.policy == "length":
        assert {answer.timings.path for answer in answers} == {"remote", "local"}


@pytest.mark.parametrize("length", [20, 40])
def test_one_token(served: Served, length: int) -> None:
    prompt = served.prompt(length, seed=2)
    answer = served.ask(prompt, max_tokens=1)
    assert answer.output_ids == tuple(served.oracle.greedy(prompt, 1))
    assert answer.finish_reason == "length"
    assert answer.timings.path == served.path(length)


def test_eos_as_first_token(served: Served) -> None:
    answer = served.ask(served.prompt_before_eos(), max_tokens=8)
    assert (answer.output_ids, answer.text) == ((served.oracle.eos,), "")
    assert answer.finish_reason == "stop"


def test_stop_token_as_first_token(served: Served) -> None:
    prompt = served.prompt_before_text()
    [first] = served.oracle.greedy(prompt, 1)
    answer = served.ask(prompt, max_tokens=8, stop_token_ids=[first])
    assert (answer.output_ids, answer.text) == ((first,), "")
    assert answer.finish_reason == "stop"


def test_stop_string_as_first_token(served: Served) -> None:
    prompt = served.prompt_before_text()
    [first] = served.oracle.greedy(prompt, 1)
    answer = served.ask(prompt, max_tokens=8, stop=[served.oracle.text([first])])
    assert (answer.output_ids, answer.text) == ((first,), "")
    assert answer.finish_reason == "stop"


def test_prefix_cache_cold_warm_and_partly_warm(served: Served) -> None:
    base = served.prompt(70, seed=3)
    forked = base[:40] + served.prompt(30, seed=4)
    for prompt, num_cached in [(base, 0), (base, 64), (forked, 32), (base[:64], 48)]:
        answer = served.ask(prompt, max_tokens=4)
        assert answer.output_ids == tuple(served.oracle.greedy(prompt, 4))
        assert answer.timings.cached_tokens == num_cached
        assert answer.timings.path == served.path(len(prompt) - num_cached)


@pytest.fixture(scope="module")
def sampled_before() -> dict[str, tuple[int, ...]]:
    """What the first server of a model sampled; those with another policy must agree."""
    return {}


def test_seeded_sampling_depends_on_neither_batch_nor_path(
    served: Served, sampled_before: dict[str, tuple[int, ...]]
) -> None:
    request = {"input_ids": served.prompt(40, seed=5), "max_tokens": 16, **SEEDED}
    alone = served.ask(request["input_ids"], max_tokens=16, **SEEDED)
    others = [
        {"input_ids": served.prompt(length, seed=6), "max_tokens": 12} for length in BATCH[:8]
    ]
    in_batch = served.ask_at_once([*others[:4], request, *others[4:]])[4]
    assert len(set(alone.output_ids)) > 4
    assert alone.timings.path == served.path(40)
    assert in_batch.timings.path == served.path(40 - 32)  # its prefix is cached now
    assert in_batch.output_ids == alone.output_ids
    assert sampled_before.setdefault(served.name, alone.output_ids) == alone.output_ids
