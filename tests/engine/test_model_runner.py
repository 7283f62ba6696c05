"""The model runner against transformers' own generate, in float32, token for token."""

from __future__ import annotations

import json
import mmap
import random
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from threading import Thread

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, T5Config

from devices import DEVICES
from tandem.engine import decoder as decoder_module
from tandem.engine import model as model_module
from tandem.engine.batch import Batch, SequenceSlice
from tandem.engine.model import LoadedModel, load_model, resolve_dtype
from tandem.engine.model_config import model_fingerprint, model_limits
from tandem.engine.model_runner import ModelRunner
from tandem.engine.slab import empty_slab, slab_tensor
from tandem.errors import ConfigError
from tandem.kv.layout import KVLayout
from tandem.types import Quantization
from tiny_models import FAMILIES, SLIDING_WINDOW, build_tiny

torch.set_num_threads(1)

BLOCK_SIZE = 8
NUM_BLOCKS = 96
CHUNK = 16
EOS = 511  # high: the tests run past it, so none of them may stop at it
PROMPT_LENGTHS = (1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * CHUNK + 1)


@dataclass
class Sequence:
    """A sequence of the harness: all its tokens, and how many of them are in the slab."""

    token_ids: list[int]
    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0

    def take(self, num_tokens: int) -> tuple[int, int]:
        start = self.num_computed
        return start, min(start + num_tokens, len(self.token_ids))


class Harness:
    """Builds batches by hand over shuffled block ids, samples greedily."""

    def __init__(self, model: LoadedModel, seed: int = 0) -> None:
        layout = model.layout(BLOCK_SIZE)
        if model.device.type == "cpu":
            memory = mmap.mmap(-1, NUM_BLOCKS * layout.block_bytes)
            self.slab = slab_tensor(memory, layout, NUM_BLOCKS)
        else:
            self.slab = empty_slab(layout, NUM_BLOCKS, model.device)
        self.slab.fill_(float("nan"))  # reading a slot that was never written shows
        self.runner = ModelRunner(model, self.slab)
        self.free_blocks = list(range(NUM_BLOCKS))
        random.Random(seed).shuffle(self.free_blocks)

    def step(self, takes: list[tuple[Sequence, int]], with_logits: bool = True) -> torch.Tensor:
        """Compute up to so many next tokens of each sequence; the logits of the last of each."""
        batch = Batch(token_ids=[], positions=[], slot_mapping=[])
        for sequence, num_tokens in takes:
            start, end = sequence.take(num_tokens)
            while len(sequence.block_table) * BLOCK_SIZE < end:
                sequence.block_table.append(self.free_blocks.pop())
            table = sequence.block_table
            batch.token_ids.extend(sequence.token_ids[start:end])
            batch.positions.extend(range(start, end))
            batch.slot_mapping.extend(
                table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(start, end)
            )
            batch.sequences.append(SequenceSlice(end - start, end, list(table)))
            sequence.num_computed = end
            if with_logits:
                batch.sample_rows.append(len(batch.token_ids) - 1)
        return self.runner.forward(batch).cpu()

    def generate(self, prompt: list[int], num_tokens: int, chunk: int = 10_000) -> list[int]:
        sequence = Sequence(list(prompt))
        while len(sequence.token_ids) < len(prompt) + num_tokens:
            logits = self.step([(sequence, chunk)])
            if sequence.num_computed == len(sequence.token_ids):
                sequence.token_ids.append(int(logits[0].argmax()))
        return sequence.token_ids[len(prompt) :]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory):
    @cache
    def build(family: str) -> Path:
        return build_tiny(family, tmp_path_factory.mktemp(family), eos_token_id=EOS)

    return build


@pytest.fixture(scope="module", params=DEVICES)
def loaded(request, directory):
    return cache(lambda family: load_model(directory(family), "float32", request.param))


@pytest.fixture(scope="module")
def oracle(directory):
    @cache
    def load(family: str) -> PreTrainedModel:
        attention = "eager" if family == "gemma2" else "sdpa"  # sdpa has no softcap
        return AutoModelForCausalLM.from_pretrained(
            directory(family), attn_implementation=attention, dtype=torch.float32
        ).eval()

    return load


def prompt_of(length: int, seed: int = 1) -> list[int]:
    return random.Random(seed * 1000 + length).choices(range(3, 500), k=length)


@torch.inference_mode()
def expected_tokens(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    output = model.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=num_tokens, eos_token_id=None
    )
    return output[0, len(prompt) :].tolist()


@torch.inference_mode()
def expected_logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([token_ids]), use_cache=False).logits[0]


@pytest.mark.parametrize("length", PROMPT_LENGTHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_generate(family, length, loaded, oracle):
    prompt = prompt_of(length)
    tokens = Harness(loaded(family)).generate(prompt, 12)
    assert tokens == expected_tokens(oracle(family), prompt, 12)


@pytest.mark.parametrize("chunk", (1, 5, BLOCK_SIZE, CHUNK))
@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_prefill_equals_generate(family, chunk, loaded, oracle):
    prompt = prompt_of(3 * CHUNK + 1)
    tokens = Harness(loaded(family)).generate(prompt, 8, chunk)
    assert tokens == expected_tokens(oracle(family), prompt, 8)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_each_row_equal_one_full_forward(family, loaded, oracle):
    """Far past the sliding window, in chunks that begin before, in and after it."""
    prompt = prompt_of(4 * SLIDING_WINDOW + 3)
    expected = expected_logits(oracle(family), prompt)
    harness, sequence = Harness(loaded(family)), Sequence(list(prompt))
    while sequence.num_computed < len(prompt):
        logits = harness.step([(sequence, SLIDING_WINDOW + 7)])
        torch.testing.assert_close(
            logits[0], expected[sequence.num_computed - 1], atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_batch_equals_each_sequence_alone(family, loaded):
    """One batch with whole prompts, middle chunks and decodes, against four batches of one."""

    def sequences(harness: Harness) -> list[tuple[Sequence, int]]:
        whole, chunked = Sequence(prompt_of(11)), Sequence(prompt_of(45))
        short, long = Sequence(prompt_of(9)), Sequence(prompt_of(40))
        harness.step([(chunked, 19)])
        harness.step([(short, 8)])
        harness.step([(long, 39)])
        return [(short, 1), (chunked, 17), (whole, 11), (long, 1)]

    together = Harness(loaded(family), seed=1)
    mixed = together.step(sequences(together))
    apart = Harness(loaded(family), seed=2)
    alone = torch.cat([apart.step([take]) for take in sequences(apart)])
    torch.testing.assert_close(mixed, alone, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ("llama", "gemma2", "gpt2"))
def test_second_sequence_reuses_the_blocks_of_a_shared_prefix(family, loaded, oracle):
    prefix = prompt_of(2 * BLOCK_SIZE)
    harness = Harness(loaded(family))
    first = Sequence(prefix + prompt_of(5, seed=2))
    harness.step([(first, 100)])
    second = Sequence(prefix + prompt_of(7, seed=3), first.block_table[:2], 2 * BLOCK_SIZE)
    logits = harness.step([(second, 100)])
    expected = expected_logits(oracle(family), second.token_ids)[-1]
    torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=1e-4)


def test_forward_without_sample_rows_still_writes_the_cache(loaded, oracle):
    harness, sequence = Harness(loaded("llama")), Sequence(prompt_of(20))
    assert harness.step([(sequence, 13)], with_logits=False).shape == (0, 512)
    logits = harness.step([(sequence, 7)])
    expected = expected_logits(oracle("llama"), sequence.token_ids)[-1]
    torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=1e-4)


def test_a_step_writes_only_the_slots_it_was_given(loaded):
    harness, sequence = Harness(loaded("llama")), Sequence(prompt_of(13))
    harness.step([(sequence, 13)])
    written = ~harness.slab.cpu().isnan().any(dim=-1)  # [blocks, layers, 2, block_size, kv_heads]
    expected = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, dtype=torch.bool)
    expected[sequence.block_table[0]] = True
    expected[sequence.block_table[1], :5] = True
    assert torch.equal(written.all(dim=(1, 2, 4)), expected)
    assert torch.equal(written.any(dim=(1, 2, 4)), expected)


def test_blocks_copied_to_another_engine_continue_the_sequence(loaded, oracle):
    """What a pull does: the bytes of the blocks move, the block ids differ."""
    prefill, decode = Harness(loaded("llama"), seed=1), Harness(loaded("llama"), seed=2)
    sequence = Sequence(prompt_of(21))
    sequence.token_ids.append(int(prefill.step([(sequence, 21)])[0].argmax()))
    table = [decode.free_blocks.pop() for _ in sequence.block_table]
    decode.slab[table] = prefill.slab[sequence.block_table]
    moved = replace(sequence, block_table=table)
    logits = decode.step([(moved, 1)])
    expected = expected_logits(oracle("llama"), sequence.token_ids)[-1]
    torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=1e-4)


def test_two_engines_in_threads_of_one_process_do_not_mix(directory, oracle):
    results: dict[str, list[int]] = {}
    # Loaded one after the other: transformers patches modules of its own while it loads, and two
    # threads that do it at once can leave a patch behind (tied weights were not tied any more).
    models = {f: load_model(directory(f), "float32", "cpu") for f in ("llama", "mistral")}

    def run(family: str) -> None:
        harness = Harness(models[family])
        results[family] = [harness.generate(prompt_of(30), 16) for _ in range(3)][-1]

    threads = [Thread(target=run, args=(family,)) for family in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for family, tokens in results.items():
        assert tokens == expected_tokens(oracle(family), prompt_of(30), 16)
    assert len(results) == 2


def test_bfloat16_stays_close_to_float32(directory, oracle):
    model = load_model(directory("llama"), "bfloat16", "cpu")
    harness, sequence = Harness(model), Sequence(prompt_of(33))
    harness.step([(sequence, 20)])
    logits = harness.step([(sequence, 13)])
    expected = expected_logits(oracle("llama"), sequence.token_ids)[-1]
    assert logits.dtype == torch.float32
    assert torch.corrcoef(torch.stack([logits[0], expected]))[0, 1] > 0.99


@pytest.mark.parametrize("family", ("llama", "qwen3", "mistral", "gemma2"))
def test_without_native_kernels_torch_computes_the_same(family, directory, oracle, monkeypatch):
    monkeypatch.setattr(model_module, "native_operations", lambda device, dtype: None)
    model = load_model(directory(family), "float32", "cpu")
    assert model.native is None
    prompt = prompt_of(3 * CHUNK + 1)
    tokens = Harness(model).generate(prompt, 12, chunk=CHUNK)
    assert tokens == expected_tokens(oracle(family), prompt, 12)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_lean_decoder_runs_what_is_built_like_llama(family, directory, caplog):
    with caplog.at_level("INFO"):
        load_model(directory(family), "float32", "cpu")
    assert ("lean decoder, native" in caplog.text) == (family in ("llama", "qwen3", "mistral"))


def test_a_decoder_that_computes_something_else_is_not_used(directory, oracle, monkeypatch, caplog):
    """As if transformers changed a layer: the check at the start sees it."""
    norm = decoder_module._norm
    monkeypatch.setattr(decoder_module, "_norm", lambda m: norm(m)._replace(eps=0.5))
    model = load_model(directory("llama"), "float32", "cpu")
    assert "transformers' modules run instead" in caplog.text
    prompt = prompt_of(20)
    assert Harness(model).generate(prompt, 8) == expected_tokens(oracle("llama"), prompt, 8)


@pytest.mark.parametrize("family", ("llama", "gpt2"))
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_int8_weights_change_the_logits_a_little(family, dtype, directory, oracle):
    model = load_model(directory(family), dtype, "cpu", Quantization.INT8)
    tokens = prompt_of(33)
    harness, sequence = Harness(model), Sequence(tokens)
    harness.step([(sequence, 20)])
    logits = harness.step([(sequence, 13)])
    expected = expected_logits(oracle(family), tokens)[-1]
    assert not torch.equal(logits[0], expected)
    assert torch.corrcoef(torch.stack([logits[0], expected]))[0, 1] > 0.98


def test_shape_of_the_cache_comes_from_the_model(loaded):
    assert loaded("llama").layout(16) == KVLayout(3, 2, 16, 16, "float32")
    assert loaded("gemma").layout(16) == KVLayout(3, 1, 32, 16, "float32")
    assert loaded("gpt2").layout(16) == KVLayout(3, 4, 16, 16, "float32")
    assert loaded("llama").layout(16).block_bytes == 3 * 2 * 16 * 2 * 16 * 4


def test_resolve_dtype_takes_the_checkpoints_on_a_gpu_and_refuses_unknown_names():
    assert resolve_dtype("float16", "cpu", None) == "float16"
    assert resolve_dtype("auto", "cuda:0", torch.bfloat16) == "bfloat16"
    assert resolve_dtype("auto", "cpu", torch.float16) in ("float32", "bfloat16")
    with pytest.raises(ConfigError, match="int8"):
        resolve_dtype("int8", "cpu", None)


def test_limits_and_fingerprint(directory, tmp_path):
    assert model_limits(directory("gpt2")).max_position_embeddings == 512
    assert model_limits(directory("llama")).vocab_size == 512
    layout = KVLayout(3, 2, 16, 16, "float32")
    same = model_fingerprint(directory("llama"), layout)
    rewritten = build_tiny("llama", tmp_path / "rewritten", eos_token_id=EOS)
    config = json.loads((rewritten / "config.json").read_text())
    (rewritten / "config.json").write_text(json.dumps(config | {"transformers_version": "9"}))
    assert model_fingerprint(rewritten, layout) == same
    assert model_fingerprint(rewritten, replace(layout, block_size=8)) != same
    assert model_fingerprint(rewritten, layout, Quantization.INT8) != same
    other_weights = build_tiny("llama", tmp_path / "other", eos_token_id=EOS, seed=7)
    assert model_fingerprint(other_weights, layout) != same


def test_longrope_is_limited_to_the_length_where_it_would_switch(tmp_path):
    config = {
        "vocab_size": 10,
        "max_position_embeddings": 4096,
        "rope_scaling": {"type": "longrope"},
        "original_max_position_embeddings": 1024,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_limits(tmp_path).max_position_embeddings == 1024


def test_models_that_cannot_run_are_refused_with_the_reason(tmp_path, directory):
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_model(tmp_path, "auto", "cpu")
    (tmp_path / "config.json").write_text((directory("llama") / "config.json").read_text())
    with pytest.raises(ConfigError, match="safetensors"):
        load_model(tmp_path, "auto", "cpu")
    (tmp_path / "model.safetensors").write_bytes(b"")
    T5Config(max_position_embeddings=8).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="encoder-decoder"):
        load_model(tmp_path, "auto", "cpu")


@pytest.mark.parametrize(
    ("config_name", "fields", "reason"),
    [
        ("GptOssConfig", {"num_local_experts": 2, "num_experts_per_tok": 1}, "attention sinks"),
        ("BloomConfig", {"max_position_embeddings": 64}, "AttentionInterface"),
        ("Qwen3NextConfig", {}, "linear_attention"),
    ],
)
def test_unsuitable_architectures_are_refused(config_name, fields, reason, tmp_path):
    import transformers

    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16}
    kind = getattr(transformers, config_name)
    config = kind(vocab_size=32, **(shape | {"num_key_value_heads": 1} | fields))
    if config_name == "Qwen3NextConfig":  # refused before any weight is read
        config.save_pretrained(tmp_path)
        (tmp_path / "model.safetensors").write_bytes(b"")
    else:
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=reason):
        load_model(tmp_path, "float32", "cpu")
