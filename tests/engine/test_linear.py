"""The layers that replace nn.Linear: packed for oneDNN, and with int8 weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tandem.engine.kernels.native import native_operations
from tandem.engine.linear import LinearPlan, PackedLinear, TileLinear, quantize_int8
from tandem.types import Quantization

torch.set_num_threads(1)

NATIVE = native_operations(torch.device("cpu"), torch.bfloat16)
HAS_TILES = NATIVE is not None and NATIVE.has_tiles_for(torch.empty(16, 32))
INT8 = LinearPlan(Quantization.INT8, native=NATIVE)


@torch.no_grad()
def test_linear_layers_of_a_cpu_model_are_packed():
    model = nn.Sequential(nn.Linear(48, 80), nn.ReLU())
    linear = model[0]
    assert LinearPlan().replace_all(model) == 1
    assert isinstance(model[0], PackedLinear)
    for shape in ((1, 1, 48), (7, 48), (0, 48)):
        rows = torch.randn(shape)
        torch.testing.assert_close(model[0](rows), linear(rows), atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("has_bias", (False, True))
def test_fused_layers_give_their_outputs_side_by_side(has_bias):
    first, second = nn.Linear(48, 80, has_bias), nn.Linear(48, 16, has_bias)
    rows = torch.randn(5, 48)
    fused = LinearPlan().fuse(first, second)
    expected = torch.cat((first(rows), second(rows)), dim=1)
    torch.testing.assert_close(fused(rows), expected, atol=1e-5, rtol=1e-5)


def test_the_largest_weight_of_an_output_is_127():
    quantized, scales = quantize_int8(torch.tensor([[0.5, -1.27, 0.014], [0.0, 0.0, 0.0]]))
    assert quantized.tolist() == [[50, -127, 1], [0, 0, 0]]
    torch.testing.assert_close(scales[0], torch.tensor(0.01))


@torch.no_grad()
@pytest.mark.parametrize("has_bias", (False, True))
@pytest.mark.parametrize("num_rows", (0, 1, 16, 17, 32, 33, 100))
@pytest.mark.parametrize("shape", ((32, 16), (96, 80), (64, 48)))
@pytest.mark.skipif(not HAS_TILES, reason="this CPU has no AMX")
def test_int8_kernel_multiplies_with_the_quantized_weights(shape, num_rows, has_bias):
    linear = nn.Linear(*shape, has_bias).bfloat16()
    layer = INT8.fuse(linear)
    assert isinstance(layer, TileLinear)
    quantized, scales = quantize_int8(linear.weight)
    rows = torch.randn(num_rows, shape[0]).bfloat16()
    bias = linear.bias.float() if has_bias else None
    expected = F.linear(rows.float(), quantized * scales[:, None], bias)
    torch.testing.assert_close(layer(rows).float(), expected, atol=2**-7, rtol=2**-7)


@torch.no_grad()
@pytest.mark.parametrize("has_bias", (False, True))
@pytest.mark.parametrize("num_rows", (0, 1, 16, 33, 100))
@pytest.mark.skipif(not HAS_TILES, reason="this CPU has no AMX")
def test_small_steps_stream_bfloat16_weights_through_tiles(num_rows, has_bias):
    linear = nn.Linear(96, 80, has_bias).bfloat16()
    assert isinstance(LinearPlan(native=NATIVE, max_rows=256).fuse(linear), PackedLinear)
    layer = LinearPlan(native=NATIVE, max_rows=128).fuse(linear)
    assert isinstance(layer, TileLinear)
    rows = torch.randn(num_rows, 96).bfloat16()
    bias = linear.bias.float() if has_bias else None
    expected = F.linear(rows.float(), linear.weight.float(), bias)
    torch.testing.assert_close(layer(rows).float(), expected, atol=2**-7, rtol=2**-7)
    for row in range(num_rows):  # whatever else is in the batch
        assert torch.equal(layer(rows[row : row + 1])[0], layer(rows)[row])


@torch.no_grad()
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_without_the_kernel_the_quantized_weights_are_used_all_the_same(dtype):
    linear = nn.Linear(33, 7).to(dtype)  # fits no tiles
    layer = INT8.fuse(linear)
    quantized, scales = quantize_int8(linear.weight)
    rows = torch.randn(4, 33).to(dtype)
    expected = F.linear(rows, (quantized * scales[:, None]).to(dtype), linear.bias)
    torch.testing.assert_close(layer(rows), expected, atol=1e-2, rtol=1e-2)
