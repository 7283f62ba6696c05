"""The operations between the matrix products of a decoder layer, with torch; on any device."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F


class Operations(Protocol):
    """Rows are tokens. A tensor may be a slice of columns of a wider one where that is said."""

    def rms_norm(self, rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """[..., size] normalised over the last dimension, times ``weight`` [size]."""

    def add_rms_norm(
        self, residual: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Adds ``rows`` to ``residual`` in place, then normalises that; both [num_tokens, size]."""

    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Turns [num_tokens, num_heads, head_dim] (a slice of columns) by the angles
        [num_tokens, head_dim], in place."""

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up [num_tokens, size], of [num_tokens, 2 * size]."""


class TorchOperations:
    """Rounds where transformers' modules round."""

    def rms_norm(self, rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = rows.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * (wide * scale).to(rows.dtype)

    def add_rms_norm(
        self, residual: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        residual += rows
        return self.rms_norm(residual, weight, eps)

    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        first, second = heads.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        heads.copy_(heads * cos.unsqueeze(1) + turned * sin.unsqueeze(1))

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
