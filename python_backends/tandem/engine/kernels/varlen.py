"""Torch's varlen attention (FlashAttention) with a block table.

The FlashAttention 2 in torch 2.13 takes float16 and bfloat16, heads of up to 256, GPUs from Ampere
on, no softcap, and blocks of 256 tokens or a multiple. A layer's K and V may be strided views.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn

from tandem.engine.batch import SequenceSlice
from tandem.engine.block_attention import GraphShape
from tandem.engine.step_inputs import StepInputs
from tandem.errors import EngineFault

# It tells of every call, at level INFO.
logging.getLogger("torch.nn.attention.varlen").setLevel(logging.WARNING)


class VarlenKernel:
    """``varlen``: ``torch.nn.attention.varlen.varlen_attn``, or what a test puts in its place."""

    def __init__(
        self,
        slab: torch.Tensor,
        inputs: StepInputs,
        graph: GraphShape | None,
        varlen: Callable[..., Any] = varlen_attn,
    ) -> None:
        self._inputs = inputs
        self._block_size = slab.shape[3]
        self._graph = graph
        self._varlen = varlen
        # [num_blocks, block_size, num_kv_heads, head_dim] of each layer
        self._keys = [slab[:, layer, 0] for layer in range(slab.shape[1])]
        self._values = [slab[:, layer, 1] for layer in range(slab.shape[1])]

    def start(self, sequences: list[SequenceSlice]) -> None:
        tables = [s.block_table[: -(-s.context_len // self._block_size)] for s in sequences]
        width = self._graph.table_width if self._graph else max(map(len, tables), default=1)
        flat = [block for table in tables for block in table + [0] * (width - len(table))]
        query_starts = list(accumulate((s.query_len for s in sequences), initial=0))
        context_lens = [s.context_len for s in sequences]
        key_starts = list(accumulate(context_lens, initial=0))
        put = self._inputs.put
        self._tables = put("tables", flat, torch.int32).view(len(sequences), width)
        self._query_starts = put("query_starts", query_starts, torch.int32)
        self._context_lens = put("context_lens", context_lens, torch.int32)
        self._key_starts = put("key_starts", key_starts, torch.int32)
        self._max_query_len = max((s.query_len for s in sequences), default=0)
        self._max_context_len = width * self._block_size  # a bound that a graph can keep

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        if softcap is not None:
            raise EngineFault("varlen_attn has no softcap")
        # Tokens to the left and right of a query, which is the last one it sees.
        span = (-1 if window is None else window - 1, 0)
        if self._max_query_len == 1 and window is None:
            # A single query sees all its keys anyway, and without a mask the kernel reads the keys
            # of a group of heads once.
            span = (-1, -1)
        output: torch.Tensor = self._varlen(
            query,
            self._keys[layer],
            self._values[layer],
            self._query_starts,
            self._key_starts,
            self._max_query_len,
            self._max_context_len,
            scale=scaling,
            window_size=span,
            enable_gqa=True,
            seqused_k=self._context_lens,
            block_table=self._tables,
            num_splits=1,  # else the split, and so the rounding, depends on the whole batch
        )
        return output
