"""The compiled kernels against torch: one operation each, and attention over scattered blocks."""

from __future__ import annotations

import logging
import random

import pytest
import torch
import torch.nn.functional as F

from tandem.engine.batch import SequenceSlice
from tandem.engine.kernels import build
from tandem.engine.kernels.native import NativeAttention, NativeOperations, native_operations
from tandem.engine.kernels.operations import TorchOperations

torch.set_num_threads(1)

DTYPES = (torch.float32, torch.bfloat16)
# One rounding of the result, of values around 1.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8}


def native(dtype: torch.dtype) -> NativeOperations:
    operations = native_operations(torch.device("cpu"), dtype)
    assert operations is not None, "no C++ compiler on this machine"
    return operations


def random_rows(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=2 * tolerance)


@pytest.mark.parametrize("num_tokens", (0, 1, 5, 90))
@pytest.mark.parametrize("dtype", DTYPES)
def test_operations_equal_torch(dtype, num_tokens):
    ours, torchs = native(dtype), TorchOperations()
    rows, other = random_rows(dtype, 2, num_tokens, 200)
    weight = random_rows(dtype, 200)
    assert_close(ours.rms_norm(rows, weight, 1e-5), torchs.rms_norm(rows, weight, 1e-5))

    residuals = rows.clone(), rows.clone()
    assert_close(
        ours.add_rms_norm(residuals[0], other, weight, 1e-5),
        torchs.add_rms_norm(residuals[1], other, weight, 1e-5),
    )
    torch.testing.assert_close(*residuals, rtol=0, atol=0)

    gate_up = torch.cat((30 * rows, other), dim=1)  # far into both tails of the sigmoid
    assert_close(ours.silu_mul(gate_up), torchs.silu_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
def test_operations_take_heads_that_are_columns_of_a_wider_tensor(dtype):
    ours, torchs = native(dtype), TorchOperations()
    wide = random_rows(dtype, 6, 5, 16)
    angles = random_rows(torch.float32, 6, 16)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    turned = wide.clone(), wide.clone()
    ours.rotate(turned[0][:, :3], cos, sin)
    torchs.rotate(turned[1][:, :3], cos, sin)
    assert_close(*turned)
    assert torch.equal(turned[0][:, 3:], wide[:, 3:])

    weight = random_rows(dtype, 16)
    assert_close(
        ours.rms_norm(wide[:, :3], weight, 1e-6), torchs.rms_norm(wide[:, :3], weight, 1e-6)
    )


class Cache:
    """Two layers of KV of some sequences in shuffled blocks; not a number where nothing is."""

    def __init__(self, dtype, num_kv_heads, head_dim, block_size, context_lens) -> None:
        counts = [-(-length // block_size) for length in context_lens]
        blocks = list(range(sum(counts)))
        random.Random(3).shuffle(blocks)
        self.slab = torch.full(
            (len(blocks), 2, 2, block_size, num_kv_heads, head_dim), float("nan"), dtype=dtype
        )
        self.tables, self.keys, self.values = [], [], []
        for length, count in zip(context_lens, counts, strict=True):
            table, blocks = blocks[:count], blocks[count:]
            keys, values = random_rows(dtype, 2, length, num_kv_heads, head_dim)
            for token in range(length):
                place = self.slab[table[token // block_size], 1, :, token % block_size]
                place[0], place[1] = keys[token], values[token]
            self.tables.append(table)
            self.keys.append(keys)
            self.values.append(values)


def expected_attention(query, keys, values, scaling, window, softcap) -> torch.Tensor:
    """[query_len, num_heads, head_dim] in float, from the definition."""
    query_len, num_heads, _ = query.shape
    context_len, num_kv_heads, _ = keys.shape
    keys = keys.float().repeat_interleave(num_heads // num_kv_heads, dim=1)
    values = values.float().repeat_interleave(num_heads // num_kv_heads, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * scaling
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    at = torch.arange(context_len - query_len, context_len)[:, None]
    key_at = torch.arange(context_len)
    is_hidden = (key_at > at) | (key_at <= at - (window or context_len))
    weights = F.softmax(scores.masked_fill(is_hidden, float("-inf")), dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


SHAPES = {  # num_heads, num_kv_heads, head_dim, block_size
    "smollm2": (9, 3, 64, 16),
    "llama": (8, 2, 128, 16),
    "odd": (4, 2, 24, 8),  # no tiles for this one
    "wide": (2, 1, 256, 32),
    "ungrouped": (3, 3, 96, 16),
}
SEQUENCES = {  # query_len, context_len
    "decode": [(1, 1), (1, 16), (1, 17), (1, 300)],
    "prefill": [(1, 1), (40, 40), (129, 129)],
    "chunks": [(5, 21), (64, 200), (1, 130), (33, 290)],
}


@pytest.mark.parametrize("options", ((None, None), (20, None), (None, 5.0), (150, None)), ids=str)
@pytest.mark.parametrize("sequences", SEQUENCES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_reads_scattered_blocks(dtype, shape, sequences, options):
    num_heads, num_kv_heads, head_dim, block_size = SHAPES[shape]
    window, softcap = options
    lens = SEQUENCES[sequences]
    cache = Cache(dtype, num_kv_heads, head_dim, block_size, [context for _, context in lens])
    attention = NativeAttention(native(dtype), cache.slab)
    # A row between the sequences belongs to none: it must stay as it is.
    starts, num_tokens = [], 0
    for query_len, _ in lens:
        starts.append(num_tokens + 1)
        num_tokens += 1 + query_len
    query = random_rows(dtype, num_tokens, num_heads + 3, head_dim)[:, :num_heads]
    output = torch.full((num_tokens, num_heads, head_dim), 7.0, dtype=dtype)
    parts = [SequenceSlice(*n, t) for n, t in zip(lens, cache.tables, strict=True)]
    attention.start(parts, starts)
    attention.attend(1, output, query, 0.3, window, softcap)
    for index, (query_len, _) in enumerate(lens):
        rows = slice(starts[index], starts[index] + query_len)
        expected = expected_attention(
            query[rows], cache.keys[index], cache.values[index], 0.3, window, softcap
        )
        tolerance = 3e-5 if dtype == torch.float32 else 2e-2  # weights are rounded to bfloat16
        torch.testing.assert_close(output[rows].float(), expected, atol=tolerance, rtol=tolerance)
        assert (output[starts[index] - 1] == 7.0).all()


def test_store_puts_each_token_into_its_slot():
    slab = torch.zeros(4, 2, 2, 8, 2, 16)
    attention = NativeAttention(native(torch.float32), slab)
    key, value = random_rows(torch.float32, 2, 3, 2, 16)
    slots = torch.tensor([4 * 8 + 5, 0, 8 * 8 + 7])  # blocks of 2 layers · (K, V) · 8 tokens
    attention.store(1, slots, key, value)
    for token, (block, offset) in enumerate(((1, 5), (0, 0), (2, 7))):
        assert torch.equal(slab[block, 1, 0, offset], key[token])
        assert torch.equal(slab[block, 1, 1, offset], value[token])
    assert slab.count_nonzero() == 2 * 3 * 2 * 16


def test_no_kernels_where_they_are_switched_off_or_nothing_compiles(monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("TANDEM_NATIVE_KERNELS", "0")
    assert build.load_library() is None
    monkeypatch.delenv("TANDEM_NATIVE_KERNELS")
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        monkeypatch.setenv("CXX", "no-such-compiler")
        assert build.load_library() is None
        monkeypatch.setenv("CXX", "false")
        assert build.load_library() is None
    assert "no C++ compiler" in caplog.text
    assert len([r for r in caplog.records if "torch computes instead" in r.message]) == 2
    assert not list((tmp_path / "kernels").iterdir())
