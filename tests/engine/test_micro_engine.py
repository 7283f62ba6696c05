"""The engine's micro-benchmark on a tiny random model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tandem.engine.model import load_model
from tandem_perf.micro.engine import EngineSizes, measure, model_shape
from tandem_perf.micro.figure import MicroOptions
from tandem_perf.micro.peaks import measure_peaks
from tiny_models import build_tiny

SIZES = EngineSizes(
    prompts=(12, 20), batches=(1, 3), contexts=(5, 17), chunk=12, block_size=4, read_bytes=1 << 20
)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_prefill_and_decode_beside_their_floors(family: str, tmp_path: Path) -> None:
    build_tiny(family, tmp_path)
    figures = list(measure(MicroOptions(tmp_path, "float32", threads=1, repeats=2), SIZES))
    assert [f.what for f in figures] == [
        "prefill 12 tokens, chunks of 12",
        "prefill 20 tokens, chunks of 12",
        "prefill 20 tokens, chunks of 20",
        "decode batch 1, context 5",
        "decode batch 1, context 17",
        "decode batch 3, context 5",
        "decode batch 3, context 17",
    ]
    for figure in figures:
        assert 0 < figure.wall.min <= figure.wall.median <= figure.wall.max
        assert figure.times_bound(figure.cpu.median) > 1, "a tiny model is all overhead"


def test_the_shape_of_a_model_counts_every_weight_once(tmp_path: Path) -> None:
    build_tiny("llama", tmp_path, vocab_size=300)
    shape = model_shape(tmp_path, load_model(tmp_path, "float32", "cpu"))
    attention = 64 * 64 + 2 * 64 * 32 + 64 * 64  # q, k and v of 2 heads of 16, o
    layer = attention + 3 * 64 * 128 + 2 * 64  # gate, up, down; two norms
    assert shape.body_params == 3 * layer + 64
    assert shape.head_params == 300 * 64
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (4, 2, 16)
    assert (shape.num_layers, shape.item_bytes) == (3, 4)


def test_tied_weights_are_the_head_and_not_the_body(tmp_path: Path) -> None:
    for name, is_tied in (("tied", True), ("untied", False)):
        build_tiny("llama", tmp_path / name, tie_word_embeddings=is_tied)
    tied, untied = (
        model_shape(tmp_path / name, load_model(tmp_path / name, "float32", "cpu"))
        for name in ("tied", "untied")
    )
    assert tied == untied


def test_peaks_are_measured_in_the_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        peaks = measure_peaks(dtype, repeats=1, read_bytes=1 << 20, gemm_size=64)
        assert peaks.bytes_per_s > 0 and peaks.flops_per_s > 0
