"""What only a GPU can show: its kernels, its graphs, and that a step waits for it once."""

from __future__ import annotations

import random

import pytest
import torch

from devices import needs_gpu
from tandem.engine.attention import AttentionOptions
from tandem.engine.attention_choice import KERNELS, choose_attention
from tandem.engine.batch import Batch, SequenceSlice
from tandem.engine.block_attention import BlockAttention
from tandem.engine.decode_graphs import CudaCapture
from tandem.engine.model import load_model
from tandem.engine.model_runner import DecodeLimits, ModelRunner
from tandem.engine.sampler import SampleRequest, sample
from tandem.engine.slab import empty_slab
from tandem.engine.step_inputs import FreshInputs
from tandem.types import SamplingParams
from tiny_models import build_tiny

pytestmark = needs_gpu

BLOCK_SIZE = 256  # what torch's kernel takes
NUM_BLOCKS = 12
LIMITS = DecodeLimits(num_sequences=6, context_len=500)
OPTIONS = (AttentionOptions(0.1, None), AttentionOptions(0.1, 100))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(build_tiny("llama", tmp_path_factory.mktemp("llama")), "bfloat16", "cuda")


def decode_batch(context_lens: list[int], seed: int = 0) -> Batch:
    dice = random.Random(seed)
    tables = [[2 * i + 1, 2 * i] for i in range(len(context_lens))]
    return Batch(
        token_ids=dice.choices(range(3, 500), k=len(context_lens)),
        positions=[n - 1 for n in context_lens],
        slot_mapping=[
            table[(n - 1) // BLOCK_SIZE] * BLOCK_SIZE + (n - 1) % BLOCK_SIZE
            for n, table in zip(context_lens, tables, strict=True)
        ],
        sequences=[
            SequenceSlice(1, n, table) for n, table in zip(context_lens, tables, strict=True)
        ],
        sample_rows=list(range(len(context_lens))),
    )


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(2, 64), (8, 128)])
def test_a_kernel_passes_the_check_of_the_start(name, dtype, num_kv_heads, head_dim, caplog):
    if name == "FlashInfer":
        pytest.importorskip("flashinfer")
    slab = torch.zeros(1, 2, 2, BLOCK_SIZE, num_kv_heads, head_dim, dtype=dtype, device="cuda")
    choice = choose_attention(slab, 3 * num_kv_heads, OPTIONS, None, {name: KERNELS[name]})
    assert isinstance(choice.attention, BlockAttention), caplog.text


@pytest.mark.parametrize("name", KERNELS)
def test_attention_of_a_sequence_does_not_depend_on_the_batch(name):
    """Bit for bit, among decoding sequences; products of matrices are another matter."""
    if name == "FlashInfer":
        pytest.importorskip("flashinfer")
    device = torch.device("cuda")
    slab = torch.randn(NUM_BLOCKS, 2, 2, BLOCK_SIZE, 2, 64, dtype=torch.bfloat16, device=device)
    attention = BlockAttention(slab, FreshInputs(device), KERNELS[name](device))
    batch = decode_batch([500, 3, 257, 256, 90])
    query, key, value = (
        torch.randn(5, heads, 64, dtype=torch.bfloat16, device=device) for heads in (6, 2, 2)
    )
    attention.start(batch)
    together = attention.attend(1, query, key, value, 0.125, None)
    for row, part in enumerate(batch.sequences):
        slot, position = batch.slot_mapping[row], batch.positions[row]
        attention.start(Batch([0], [position], [slot], [part], [0]))
        rows = slice(row, row + 1)
        alone = attention.attend(1, query[rows], key[rows], value[rows], 0.125, None)
        assert torch.equal(alone, together[rows])


def test_float32_and_small_blocks_run_without_the_kernels(tmp_path, caplog):
    model = load_model(build_tiny("llama", tmp_path), "float32", "cuda")
    ModelRunner(model, empty_slab(model.layout(16), 40, model.device), LIMITS)
    assert "gathered for each sequence" in caplog.text


def test_a_capture_that_fails_leaves_the_gpu_usable():
    before = torch.cuda.current_stream()
    values = torch.ones(4, device="cuda")

    def waits():
        return values * values.sum().item()  # not permitted while capturing

    with pytest.raises(RuntimeError):
        CudaCapture()(waits)
    assert torch.cuda.current_stream() == before
    assert (values + 1).tolist() == [2, 2, 2, 2]
    captured = CudaCapture()(lambda: values * 3)
    values.fill_(5)
    captured.replay()
    assert captured.logits.tolist() == [15, 15, 15, 15]


def test_decode_graphs_are_captured_and_equal_the_eager_pass(model, caplog):
    slab = empty_slab(model.layout(BLOCK_SIZE), NUM_BLOCKS + 1, model.device)
    with caplog.at_level("INFO"):
        runner = ModelRunner(model, slab, LIMITS)
    assert "decode graphs for 1, 2, 4, 6 sequences" in caplog.text, caplog.text
    slab.normal_()
    slab[-1] = torch.nan  # the scratch block is written before it is read
    eager = ModelRunner(model, slab.clone())
    for seed, context_lens in enumerate(([7], [500, 1, 256, 257, 8, 99], [300, 5, 480])):
        batch = decode_batch(context_lens, seed)
        expected = eager.forward(batch)
        difference = (runner.forward(batch) - expected).abs().max() / expected.abs().max()
        assert difference < 0.03


def test_a_step_waits_for_the_gpu_once(model):
    slab = empty_slab(model.layout(BLOCK_SIZE), NUM_BLOCKS + 1, model.device)
    runner = ModelRunner(model, slab, LIMITS)
    decode = decode_batch([7, 300, 256])
    prompt = Batch(
        list(range(20)), list(range(20)), list(range(20)), [SequenceSlice(20, 20, [0])], [19]
    )
    requests = [
        SampleRequest(SamplingParams(max_tokens=9, **params), (1, 2), (3,))
        for params in ({}, {"temperature": 0.8, "top_k": 5, "seed": 1}, {"logprobs": True})
    ]
    for batch in (decode, prompt):  # memory that torch keeps
        sample(runner.forward(batch), requests[: len(batch.sample_rows)])
    for batch in (decode, prompt):
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with pytest.warns(UserWarning) as waits:
                sample(runner.forward(batch), requests[: len(batch.sample_rows)])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        messages = [str(wait.message) for wait in waits]
        assert sum("synchronizing" in message for message in messages) == 1, messages
