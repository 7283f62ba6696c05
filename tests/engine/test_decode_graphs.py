"""Decode graphs with a tape of operations in the place of a CUDA graph."""

from __future__ import annotations

import random
from functools import cache, partial

import pytest
import torch

from engine_pair import BLOCK_SIZE, EnginePair
from fake_kernels import FLASHINFER, TapeCapture, varlen
from tandem.engine import build as build_module
from tandem.engine import model as model_module
from tandem.engine import model_runner as runner_module
from tandem.engine.attention_choice import choose_attention
from tandem.engine.batch import Batch, SequenceSlice
from tandem.engine.decode_graphs import Captured, graph_sizes, is_plain_decode, pad_decode
from tandem.engine.kernels.flashinfer import FlashInferKernels
from tandem.engine.kernels.varlen import VarlenKernel
from tandem.engine.model import LoadedModel, load_model
from tandem.engine.model_runner import DecodeLimits, ModelRunner
from tandem.engine.slab import empty_slab
from tandem.errors import ConfigError
from tandem.types import Role
from tiny_models import build_tiny

torch.set_num_threads(1)

NUM_BLOCKS = 24
LIMITS = DecodeLimits(num_sequences=6, context_len=4 * BLOCK_SIZE)
KERNELS = {
    "varlen": lambda device: partial(VarlenKernel, varlen=varlen),
    "FlashInfer": lambda device: FlashInferKernels(FLASHINFER, device),
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    @cache
    def load(family: str) -> LoadedModel:
        # Operations that torch does not dispatch are not on a tape.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model_module, "native_operations", lambda device, dtype: None)
            patch.setattr("tandem.engine.linear._is_packable", lambda weight: False)
            return load_model(build_tiny(family, tmp_path_factory.mktemp(family)), "float32", "cpu")

    return load


@pytest.fixture
def use_fakes(monkeypatch):
    """As on a GPU with this kernel; returns the tape."""

    def use(kernel: str, capture: TapeCapture | None = None) -> TapeCapture:
        kernels = {kernel: KERNELS[kernel]}
        choose = partial(choose_attention, kernels=kernels)
        capture = capture or TapeCapture()
        monkeypatch.setattr(runner_module, "choose_attention", choose)
        monkeypatch.setattr(runner_module, "CudaCapture", lambda: capture)
        return capture

    return use


def decode_batch(num_sequences: int, seed: int) -> Batch:
    """Contexts of one to three blocks that lie scattered over the slab."""
    dice = random.Random(seed)
    blocks = dice.sample(range(NUM_BLOCKS - 1), 3 * num_sequences)
    lens = [dice.randrange(1, 3 * BLOCK_SIZE + 1) for _ in range(num_sequences)]
    tables = [blocks[3 * i : 3 * i + 3] for i in range(num_sequences)]
    at = [(n - 1, table) for n, table in zip(lens, tables, strict=True)]
    return Batch(
        token_ids=dice.choices(range(3, 500), k=num_sequences),
        positions=[position for position, _ in at],
        slot_mapping=[t[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p, t in at],
        sequences=[SequenceSlice(1, n, table) for n, table in zip(lens, tables, strict=True)],
        sample_rows=list(range(num_sequences)),
    )


def test_sizes_are_powers_of_two_and_the_largest_batch():
    assert graph_sizes(1) == [1]
    assert graph_sizes(8) == [1, 2, 4, 8]
    assert graph_sizes(100) == [1, 2, 4, 8, 16, 32, 64, 100]


def test_only_steps_in_which_every_sequence_decodes_are_for_a_graph():
    decode = decode_batch(3, seed=0)
    assert is_plain_decode(decode)
    table = [0]
    unsampled = Batch([5], [3], [3], [SequenceSlice(1, 4, table)], [])  # a chunk of one token
    prefill = Batch([5, 6], [0, 1], [0, 1], [SequenceSlice(2, 2, table)], [1])
    assert not is_plain_decode(unsampled)
    assert not is_plain_decode(prefill)
    assert not is_plain_decode(Batch([], [], []))


def test_padding_is_a_sequence_of_one_token_in_the_scratch_block():
    batch = Batch([9], [20], [36], [SequenceSlice(1, 21, [5, 2])], [0])
    padded = pad_decode(batch, 3, scratch_slot=7 * 16, block_size=16)
    assert padded.token_ids == [9, 0, 0]
    assert padded.positions == [20, 0, 0]
    assert padded.slot_mapping == [36, 112, 112]
    assert padded.sequences == [*batch.sequences, *[SequenceSlice(1, 1, [7])] * 2]
    assert padded.sample_rows == [0, 1, 2]
    assert batch.num_tokens == 1, "the batch itself is not changed"


@pytest.mark.parametrize(
    ("family", "kernel"),
    [
        ("llama", "varlen"),  # the lean decoder
        ("mistral", "varlen"),  # with a window
        ("gpt2", "varlen"),  # transformers' modules
        ("llama", "FlashInfer"),
        ("gemma2", "FlashInfer"),  # two kinds of layers, softcap
    ],
)
def test_a_replay_computes_what_the_eager_pass_does(family, kernel, loaded, use_fakes, caplog):
    model = loaded(family)
    tape = use_fakes(kernel)
    slab = empty_slab(model.layout(BLOCK_SIZE), NUM_BLOCKS, model.device)
    with caplog.at_level("INFO"):
        runner = ModelRunner(model, slab, LIMITS)
    assert "decode graphs for 1, 2, 4, 6 sequences" in caplog.text
    start = torch.randn(slab.shape, generator=torch.Generator().manual_seed(3))
    start[-1] = torch.nan  # the scratch block is written before it is read
    eager_slab = start.clone()
    eager = ModelRunner(model, eager_slab)
    for seed, num_sequences in enumerate((1, 6, 3, 5, 2, 4)):
        batch = decode_batch(num_sequences, seed)
        slab.copy_(start)
        eager_slab.copy_(start)
        tape.num_replays = 0
        logits = runner.forward(batch)
        assert tape.num_replays == 1
        torch.testing.assert_close(logits, eager.forward(batch), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(slab[:-1], eager_slab[:-1], atol=1e-4, rtol=1e-4)


def test_other_steps_run_eagerly(loaded, use_fakes):
    model = loaded("llama")
    tape = use_fakes("varlen")
    slab = empty_slab(model.layout(BLOCK_SIZE), NUM_BLOCKS, model.device)
    runner = ModelRunner(model, slab, LIMITS)
    tape.num_replays = 0
    assert runner.forward(decode_batch(7, seed=0)).shape == (7, 512), "more than the largest graph"
    prompt = Batch(list(range(5)), list(range(5)), list(range(5)), [SequenceSlice(5, 5, [0])], [4])
    assert runner.forward(prompt).shape == (1, 512)
    assert tape.num_replays == 0


class _Broken(TapeCapture):
    def __call__(self, run):
        raise RuntimeError("operation not permitted when stream is capturing")


class _Wrong(TapeCapture):
    """A graph that reads what was there when it was captured."""

    def __call__(self, run):
        captured = super().__call__(run)
        return Captured(captured.logits, lambda: None)


@pytest.mark.parametrize(
    ("capture", "reason"),
    [(_Broken(), "RuntimeError: operation not permitted"), (_Wrong(), "replays are")],
)
def test_without_graphs_that_work_steps_run_eagerly(capture, reason, loaded, use_fakes, caplog):
    model = loaded("llama")
    use_fakes("varlen", capture)
    slab = empty_slab(model.layout(BLOCK_SIZE), NUM_BLOCKS, model.device)
    runner = ModelRunner(model, slab, LIMITS)
    assert f"no decode graphs: {reason}" in caplog.text
    batch = decode_batch(3, seed=1)
    expected = ModelRunner(model, slab.clone()).forward(batch)
    torch.testing.assert_close(runner.forward(batch), expected, atol=1e-4, rtol=1e-4)


def test_an_engine_with_graphs_generates_the_same_tokens(loaded, use_fakes, monkeypatch):
    model = loaded("llama")
    dice = random.Random(5)
    prompts = [dice.choices(range(3, 500), k=length) for length in (3, 17, 40, 16, 70)]

    def serve() -> list[list[int]]:
        pair = EnginePair(model, max_num_seqs=4, max_model_len=128)
        specs = [pair.spec(prompt, max_tokens=20) for prompt in prompts]
        return [output.token_ids for output in pair.serve(specs, [True, False] * 2 + [True])]

    expected = serve()
    tape = use_fakes("varlen")
    monkeypatch.setattr(
        build_module, "_num_scratch_blocks", lambda settings, _: settings.role is Role.DECODE
    )
    assert serve() == expected
    assert tape.num_replays > 20


def test_the_scratch_block_is_not_for_sequences(loaded, use_fakes, monkeypatch, tmp_path):
    model = load_model(
        build_tiny("llama", tmp_path, max_position_embeddings=1360), "float32", "cpu"
    )
    num_blocks = 2**20 // model.layout(BLOCK_SIZE).block_bytes
    assert num_blocks * BLOCK_SIZE == 1360, "the test's premise: one request takes all blocks"
    assert EnginePair(model, kv_cache_mb=1).decode.engine.load().num_blocks == num_blocks
    use_fakes("varlen")
    monkeypatch.setattr(build_module, "_num_scratch_blocks", lambda settings, _: 1)
    with pytest.raises(ConfigError, match="max_model_len 1360"):
        EnginePair(model, kv_cache_mb=1)
    pair = EnginePair(loaded("llama"), kv_cache_mb=1, max_num_seqs=2)
    assert pair.decode.engine.load().num_blocks == num_blocks - 1
