"""Greedy output equals transformers' generate, token for token, whichever way a request takes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from devices import DEVICES
from engine_pair import BLOCK_SIZE, CHUNK, EnginePair
from tandem.engine.model import LoadedModel, load_model
from tandem.types import FinishReason
from tandem.wire import Admitted
from tiny_models import build_tiny

FAMILIES = ["llama", "qwen3", "mistral", "gemma", "gemma2", "gpt2"]
MAX_LEN = 256
PROMPT_LENGTHS = [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * CHUNK + 1, MAX_LEN - 1]


class Oracle:
    """transformers' own generate on the same weights."""

    def __init__(self, directory: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=torch.float32,
            attn_implementation="eager" if "gemma2" in directory.name else "sdpa",
        ).eval()

    def greedy(
        self, prompt_ids: list[int], max_tokens: int, stop: list[int] | None = None
    ) -> list[int]:
        ids = self._model.generate(
            torch.tensor([prompt_ids]),
            attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=stop or None,
            pad_token_id=0,
        )
        return ids[0, len(prompt_ids) :].tolist()


@pytest.fixture(scope="module", params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, device, tmp_path_factory):
    torch.set_num_threads(1)
    directory = build_tiny(
        request.param, tmp_path_factory.mktemp(request.param), max_position_embeddings=MAX_LEN
    )
    return load_model(directory, "float32", device), Oracle(directory)


@pytest.fixture(scope="module")
def llama(device, tmp_path_factory):
    torch.set_num_threads(1)
    directory = build_tiny(
        "llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=MAX_LEN
    )
    return load_model(directory, "float32", device), Oracle(directory)


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length}/{seed}").choices(range(3, 500), k=length)


@pytest.mark.parametrize("remote", [True, False], ids=["remote", "local"])
@pytest.mark.parametrize("length", PROMPT_LENGTHS)
def test_alone(family: tuple[LoadedModel, Oracle], length: int, remote: bool) -> None:
    model, oracle = family
    pair = EnginePair(model)
    max_tokens = min(10, MAX_LEN - length)
    [output] = pair.serve([pair.spec(prompt(length), max_tokens=max_tokens)], [remote])
    assert output.token_ids == oracle.greedy(prompt(length), max_tokens)
    assert output.finish_reason is FinishReason.LENGTH
    assert pair.prefill.is_empty and pair.decode.is_empty


def test_mixed_batch_of_16(family: tuple[LoadedModel, Oracle]) -> None:
    model, oracle = family
    pair = EnginePair(model)
    lengths = [1, 15, 16, 17, 33, 47, 64, 97, 5, 31, 32, 120, 2, 80, 48, 9]
    prompts = [prompt(length, seed) for seed, length in enumerate(lengths)]
    max_tokens = [1 + seed % 12 for seed in range(16)]
    specs = [pair.spec(p, max_tokens=m) for p, m in zip(prompts, max_tokens, strict=True)]
    outputs = pair.serve(specs, [seed % 2 == 0 for seed in range(16)])
    for output, p, m in zip(outputs, prompts, max_tokens, strict=True):
        assert output.token_ids == oracle.greedy(p, m)
    assert pair.prefill.is_empty and pair.decode.is_empty


@pytest.mark.parametrize("remote", [True, False], ids=["remote", "local"])
def test_one_token(llama: tuple[LoadedModel, Oracle], remote: bool) -> None:
    model, oracle = llama
    pair = EnginePair(model)
    [output] = pair.serve([pair.spec(prompt(40), max_tokens=1)], [remote])
    assert output.token_ids == oracle.greedy(prompt(40), 1)
    assert pair.prefill.engine.stats().num_leases == 0
    assert pair.prefill.is_empty and pair.decode.is_empty


@pytest.mark.parametrize("remote", [True, False], ids=["remote", "local"])
@pytest.mark.parametrize("position", [0, 1, 4])
def test_stop_token(llama: tuple[LoadedModel, Oracle], remote: bool, position: int) -> None:
    model, oracle = llama
    stop = oracle.greedy(prompt(40), 8)[position]
    expected = oracle.greedy(prompt(40), 8, stop=[stop])
    pair = EnginePair(model)
    spec = pair.spec(prompt(40), max_tokens=8, stop_token_ids=(stop,))
    [output] = pair.serve([spec], [remote])
    assert output.token_ids == expected
    assert output.token_ids[-1] == stop
    assert output.finish_reason is FinishReason.STOP
    assert pair.prefill.is_empty and pair.decode.is_empty


@pytest.mark.parametrize("remote", [True, False], ids=["remote", "local"])
def test_prefix_cache_cold_warm_and_partly_warm(
    llama: tuple[LoadedModel, Oracle], remote: bool
) -> None:
    model, oracle = llama
    pair = EnginePair(model)
    base = prompt(70)
    forked = base[:40] + prompt(30, seed=9)
    host = pair.prefill if remote else pair.decode
    for ids, num_cached in [(base, 0), (base, 64), (forked, 32), (base[:64], 48)]:
        spec = pair.spec(ids)
        [output] = pair.serve([spec], [remote])
        assert output.token_ids == oracle.greedy(ids, 8)
        if remote:
            assert output.num_cached_tokens == num_cached
    assert host.blocks["cached"] > 0
    assert pair.prefill.is_empty and pair.decode.is_empty


def test_decode_pulls_only_the_blocks_it_lacks(llama: tuple[LoadedModel, Oracle]) -> None:
    model, _ = llama
    pair = EnginePair(model)
    pair.serve([pair.spec(prompt(70))], [True])
    [reply] = pair.decode.replies.values()
    assert pair.decode.result(reply.call_id, Admitted).num_pulled_blocks == 5
    pair.serve([pair.spec(prompt(70))], [True])
    second = max(pair.decode.replies)
    assert pair.decode.result(second, Admitted).num_pulled_blocks == 1
    assert pair.decode.result(second, Admitted).num_cached_tokens == 64


def test_seeded_sampling_does_not_depend_on_batch_or_path(
    llama: tuple[LoadedModel, Oracle],
) -> None:
    model, _ = llama
    sampling = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "seed": 1234, "max_tokens": 24}

    def alone(remote: bool) -> list[int]:
        pair = EnginePair(model)
        [output] = pair.serve([pair.spec(prompt(40), **sampling)], [remote])
        return output.token_ids

    def in_a_batch(remote: bool) -> list[int]:
        pair = EnginePair(model)
        others = [pair.spec(prompt(10 + 7 * i, seed=i), max_tokens=20) for i in range(12)]
        specs = [*others[:6], pair.spec(prompt(40), **sampling), *others[6:]]
        outputs = pair.serve(specs, [remote if i == 6 else i % 2 == 0 for i in range(13)])
        return outputs[6].token_ids

    expected = alone(remote=False)
    assert len(set(expected)) > 5
    assert alone(remote=True) == expected
    assert in_a_batch(remote=False) == expected
    assert in_a_batch(remote=True) == expected


def test_a_sequence_goes_on_after_a_failover(llama: tuple[LoadedModel, Oracle]) -> None:
    """Penalties and min_tokens count over the tokens that an earlier attempt sent."""
    model, _ = llama
    sampling = {
        "temperature": 0.8,
        "seed": 7,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.4,
        "min_tokens": 10,
        "stop_token_ids": tuple(range(3, 200)),
        "max_tokens": 20,
        "logprobs": True,
    }
    pair = EnginePair(model)
    [whole] = pair.serve([pair.spec(prompt(40), **sampling)], [False])
    assert len(whole.token_ids) > 10
    for remote in (True, False):
        for sent in (1, 5, 9):
            again = EnginePair(model)
            spec = again.spec(prompt(40), whole.token_ids[:sent], **sampling)
            [rest] = again.serve([spec], [remote])
            assert rest.token_ids == whole.token_ids[sent:]
            assert rest.logprobs == pytest.approx(whole.logprobs[sent:], abs=1e-4)


def test_preempted_sequences_end_as_if_nothing_happened(
    llama: tuple[LoadedModel, Oracle],
) -> None:
    """Blocks for about ten sequences, sixteen of them wanted at once."""
    model, oracle = llama
    num_blocks = 2**20 // model.layout(BLOCK_SIZE).block_bytes
    assert num_blocks < 16 * 110 // BLOCK_SIZE, "the test's premise"
    pair = EnginePair(model, kv_cache_mb=1)
    prompts = [prompt(50 + i, seed=i) for i in range(16)]
    specs = [pair.spec(p, max_tokens=60) for p in prompts]
    outputs = pair.serve(specs, [i % 3 == 0 for i in range(16)])
    assert pair.decode.engine.stats().totals["preemptions"] > 0
    for output, p in zip(outputs, prompts, strict=True):
        assert output.token_ids == oracle.greedy(p, 60)
    assert pair.prefill.is_empty and pair.decode.is_empty
