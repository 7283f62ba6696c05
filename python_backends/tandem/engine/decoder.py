"""A lean forward pass for models built like Llama: Llama, Mistral, Qwen2, Qwen3.

transformers' modules spend more time between the matrix products of a decode step than in them.
This takes the weights of a loaded model, fuses the projections that read the same rows (Q, K and V;
gate and up), and calls one operation where the modules call ten. Other models stay with
transformers' own forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from tandem.engine.attention import AttentionOptions, PagedAttention
from tandem.engine.kernels.operations import TorchOperations
from tandem.engine.linear import LinearPlan

_MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})


class _Norm(NamedTuple):
    weight: torch.Tensor
    eps: float


@dataclass(frozen=True)
class _Layer:
    input_norm: _Norm
    qkv: nn.Module
    query_norm: _Norm | None
    key_norm: _Norm | None
    output: nn.Module
    mlp_norm: _Norm
    gate_up: nn.Module
    down: nn.Module
    attention: AttentionOptions


def has_lean_decoder(config: Any) -> bool:
    return config.model_type in _MODEL_TYPES and config.hidden_act == "silu"


class Decoder:
    """The layers and the head of one model. Takes ``causal_lm`` apart layer by layer, so that its
    weights are not in memory twice; its own forward pass does not work afterwards.
    """

    def __init__(
        self,
        causal_lm: Any,
        options: Sequence[AttentionOptions],
        plan: LinearPlan,
    ) -> None:
        model, config = causal_lm.model, causal_lm.config
        self._operations = plan.native or TorchOperations()
        self._embedding = model.embed_tokens.weight.detach()
        self._rotary = model.rotary_emb
        self._head_dim = model.layers[0].self_attn.head_dim
        self._num_heads = config.num_attention_heads
        self._num_kv_heads = config.num_key_value_heads
        self._layers = []
        for index, layer in enumerate(model.layers):
            self._layers.append(_take_apart(layer, options[index], plan))
            layer.self_attn = layer.mlp = None
        self._norm = _norm(model.norm)
        self._head = plan.fuse(causal_lm.lm_head)

    def forward(
        self,
        token_ids: torch.Tensor,  # [num_tokens]
        positions: torch.Tensor,  # [num_tokens]
        sample_rows: torch.Tensor,  # [num_sampled]
        attention: PagedAttention,
    ) -> torch.Tensor:
        """Logits [num_sampled, vocab_size] in the model's dtype."""
        operations = self._operations
        residual = F.embedding(token_ids, self._embedding)
        cos, sin = (angles[0] for angles in self._rotary(residual, positions[None]))
        rows = operations.rms_norm(residual, *self._layers[0].input_norm)
        next_norms = [layer.input_norm for layer in self._layers[1:]] + [self._norm]
        for index, (layer, next_norm) in enumerate(zip(self._layers, next_norms, strict=True)):
            query, key, value = self._project(layer, rows, cos, sin)
            attended = attention.attend(index, query, key, value, *layer.attention).flatten(1)
            if next_norm is self._norm:  # nobody reads the other rows any more
                attended, residual = attended[sample_rows], residual[sample_rows]
            rows = operations.add_rms_norm(residual, layer.output(attended), *layer.mlp_norm)
            rows = layer.down(operations.silu_mul(layer.gate_up(rows)))
            rows = operations.add_rms_norm(residual, rows, *next_norm)
        logits: torch.Tensor = self._head(rows)
        return logits

    def _project(
        self,
        layer: _Layer,
        rows: torch.Tensor,  # [num_tokens, hidden_size]
        cos: torch.Tensor,  # [num_tokens, head_dim]
        sin: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key, value [num_tokens, (num_heads | num_kv_heads), head_dim]."""
        num_heads, num_kv_heads = self._num_heads, self._num_kv_heads
        heads = layer.qkv(rows).view(len(rows), num_heads + 2 * num_kv_heads, self._head_dim)
        query, key, value = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        if layer.query_norm is None or layer.key_norm is None:
            # They lie side by side, so one call turns both.
            self._operations.rotate(heads[:, : num_heads + num_kv_heads], cos, sin)
        else:
            query = self._operations.rms_norm(query, *layer.query_norm)
            key = self._operations.rms_norm(key, *layer.key_norm)
            self._operations.rotate(query, cos, sin)
            self._operations.rotate(key, cos, sin)
        return query, key, value


def _take_apart(layer: Any, attention: AttentionOptions, plan: LinearPlan) -> _Layer:
    self_attn, mlp = layer.self_attn, layer.mlp
    has_norms = getattr(self_attn, "q_norm", None) is not None
    return _Layer(
        input_norm=_norm(layer.input_layernorm),
        qkv=plan.fuse(self_attn.q_proj, self_attn.k_proj, self_attn.v_proj),
        query_norm=_norm(self_attn.q_norm) if has_norms else None,
        key_norm=_norm(self_attn.k_norm) if has_norms else None,
        output=plan.fuse(self_attn.o_proj),
        mlp_norm=_norm(layer.post_attention_layernorm),
        gate_up=plan.fuse(mlp.gate_proj, mlp.up_proj),
        down=plan.fuse(mlp.down_proj),
        attention=attention,
    )


def _norm(module: Any) -> _Norm:
    return _Norm(module.weight.detach(), module.variance_epsilon)
