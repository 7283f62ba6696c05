"""Linear layers for inference: weights laid out once for the kernels that read them, or in int8."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from tandem.engine.kernels.native import NativeOperations
from tandem.types import Quantization

MANY_ROWS = 200  # from here on oneDNN is faster than a stream of tiles
_ROWS_HINT = 8  # the layout chosen for a small decode batch serves all sizes well


@dataclass(frozen=True)
class LinearPlan:
    """How the weights of one engine are kept. ``max_rows``: of the largest step it will run."""

    quantization: Quantization = Quantization.NONE
    max_rows: int = MANY_ROWS
    native: NativeOperations | None = None

    def fuse(self, *linears: nn.Linear) -> nn.Module:
        """One layer whose outputs are those of ``linears`` side by side; all read the same rows."""
        weight = torch.cat([linear.weight.detach() for linear in linears])
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        assert len(biases) in (0, len(linears))
        bias = torch.cat(biases) if biases else None
        native = self.native
        if native is not None and not native.has_tiles_for(weight):
            native = None
        if self.quantization is Quantization.INT8:
            quantized, scales = quantize_int8(weight)
            if native is not None:
                return TileLinear(quantized, scales, bias, native)
            weight = (quantized * scales[:, None]).to(weight.dtype)
        elif native is not None and self.max_rows < MANY_ROWS:
            return TileLinear(weight, None, bias, native)
        if _is_packable(weight):
            return PackedLinear(weight, bias)
        plain = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
        plain.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            plain.bias = nn.Parameter(bias, requires_grad=False)
        return plain

    def replace_all(self, model: nn.Module) -> int:
        """Replaces every ``nn.Linear`` of a model in place; returns how many."""
        num_replaced = 0
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if type(child) is nn.Linear:
                    setattr(module, name, self.fuse(child))
                    num_replaced += 1
        return num_replaced


def quantize_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``weight`` [outputs, inputs] ≈ int8 [outputs, inputs] times float scales [outputs].

    Symmetric, the largest weight of an output is 127; rounded to nearest.
    """
    wide = weight.float()
    scales = wide.abs().amax(dim=1).clamp(min=1e-12) / 127
    return (wide / scales[:, None]).round().to(torch.int8), scales


class PackedLinear(nn.Module):
    """``nn.Linear`` on CPU, laid out for oneDNN; keeps only the packed weight.

    ``nn.Linear`` lets the BLAS repack the weight on every call, which costs most where few rows
    share it: with 2 to 32 sequences decoding, this is 1.2 to 2.5 times as fast.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if rows.numel() == 0:
            return rows.new_empty(*rows.shape[:-1], self.out_features)
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._weight, self._bias, "none", [], ""
        )
        return output


class TileLinear(nn.Module):
    """Inputs and outputs in bfloat16, sums in float; weights in bfloat16 or int8 with scales.

    The weights stream through the tiles as fast as memory gives them: a fifth faster than oneDNN
    for up to 32 rows, as fast for 128, slower beyond.
    """

    def __init__(
        self,
        weight: torch.Tensor,  # [outputs, inputs] bfloat16 or int8
        scales: torch.Tensor | None,  # [outputs] float
        bias: torch.Tensor | None,
        native: NativeOperations,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._weight = native.pack_tiles(weight)
        self._scales = scales
        self._bias = None if bias is None else bias.float()
        self._native = native

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        output = rows.new_empty(*rows.shape[:-1], self.out_features)
        self._native.linear(output, rows.contiguous(), self._weight, self._scales, self._bias)
        return output


def _is_packable(weight: torch.Tensor) -> bool:
    """oneDNN computes this dtype on this device."""
    return weight.device.type == "cpu" and weight.dtype in _packable_dtypes()


@cache
def _packable_dtypes() -> set[torch.dtype]:
    if not torch.backends.mkldnn.is_available():
        return set()
    dtypes = {torch.float32}
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        dtypes.add(torch.bfloat16)
    if torch.ops.mkldnn._is_mkldnn_fp16_supported():
        dtypes.add(torch.float16)
    return dtypes
