"""Paged attention behind transformers' AttentionInterface.

::

    ModelRunner ── model(input_ids, ..., paged_attention=state)     the state travels as a kwarg,
                     └ layer 0..n: attention function (registered)   so that engines in one process
                          └ state(module, query, key, value, ...)    share nothing
                               1. key, value → slab at the slots of the step
                               2. attend over the blocks of each sequence:
                                  one after the other (sequence_attention.py), or
                                  all in one call on a GPU (block_attention.py)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import nn
from transformers import AttentionInterface

from tandem.engine.batch import Batch
from tandem.engine.step_inputs import StepInputs
from tandem.errors import EngineFault

ATTENTION_NAME = "tandem_paged"


class AttentionOptions(NamedTuple):
    """What transformers' layer asks of its attention."""

    scaling: float  # of the scores
    window: int | None  # tokens a query sees, itself included
    softcap: float | None = None  # of the scores (Gemma 2)


class AttentionState(Protocol):
    """What a forward pass carries to each of its attention layers."""

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,  # [1, num_heads, num_tokens, head_dim]
        key: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
        value: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> torch.Tensor: ...  # [1, num_tokens, num_heads, head_dim], contiguous


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    paged_attention: AttentionState | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The function transformers calls in each layer; hands over to the state of this pass."""
    if paged_attention is None:
        raise EngineFault(f"{type(module).__name__} does not pass keyword arguments to attention")
    return paged_attention(module, query, key, value, attention_mask, **options), None


# No mask function under this name: transformers then builds no mask at all.
AttentionInterface.register(ATTENTION_NAME, attention_forward)


class PagedAttention(ABC):
    """Keeps keys and values in the slab and computes attention over block tables.

    Owned by the thread that runs the model: ``start`` a step, then run all layers of it.
    """

    def __init__(self, slab: torch.Tensor, inputs: StepInputs) -> None:
        _, num_layers, _, block_size, num_kv_heads, head_dim = slab.shape
        assert slab.is_contiguous()
        self._inputs = inputs
        self._block_size = block_size
        self._stride = 2 * num_layers  # rows of K or V in one block of the slab
        # Row r of every block is K (even) or V (odd) of layer r // 2. A view that begins at row r
        # of block 0 turns the same index into that row of any block.
        tokens = slab.view(-1, num_kv_heads, head_dim)
        self._token_views = [tokens[row * block_size :] for row in range(self._stride)]

    def start(self, batch: Batch) -> None:
        """Prepare the index tensors of one step; they are the same in every layer."""
        size, stride = self._block_size, self._stride
        slots = [slot // size * size * stride + slot % size for slot in batch.slot_mapping]
        self._slots = self._inputs.put("slots", slots)  # [num_tokens] into a token view

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **_: Any,
    ) -> torch.Tensor:
        output = self.attend(
            cast(int, module.layer_idx),
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            query.shape[-1] ** -0.5 if scaling is None else scaling,
            sliding_window,
            softcap,
        )
        return output.unsqueeze(0)

    @abstractmethod
    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        scaling: float,
        window: int | None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """[num_tokens, num_heads, head_dim], contiguous; keeps ``key`` and ``value``."""

    def _store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._token_views[2 * layer].index_copy_(0, self._slots, key)
        self._token_views[2 * layer + 1].index_copy_(0, self._slots, value)
