"""Attention over the slab, one sequence after the other: on CPU, and what a GPU falls back to."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tandem.engine.attention import PagedAttention
from tandem.engine.batch import Batch, SequenceSlice
from tandem.engine.kernels.native import NativeAttention, NativeOperations
from tandem.engine.step_inputs import FreshInputs


class SequenceAttention(PagedAttention):
    """Each sequence is computed by itself, so its result does not depend on the rest of the batch.
    The compiled kernels read the blocks where they lie; what they do not take is gathered for
    torch's attention.
    """

    def __init__(self, slab: torch.Tensor, operations: NativeOperations | None = None) -> None:
        super().__init__(slab, FreshInputs(slab.device))
        num_blocks, _, _, block_size, num_kv_heads, head_dim = slab.shape
        self._device = slab.device
        rows = slab.view(num_blocks * self._stride, block_size, num_kv_heads, head_dim)
        self._row_views = [rows[row:] for row in range(self._stride)]  # as the token views
        self._native = None if operations is None else NativeAttention(operations, slab)
        self._masks: dict[tuple[int, int, int], torch.Tensor] = {}

    def start(self, batch: Batch) -> None:
        super().start(batch)
        self._masks = {}
        native: list[tuple[SequenceSlice, int]] = []
        gathered: list[tuple[SequenceSlice, int]] = []
        for part in zip(batch.sequences, batch.cu_seqlens, strict=False):
            (native if self._is_native(part[0]) else gathered).append(part)
        self._has_native = bool(native)
        if self._native is not None and native:
            self._native.start([s for s, _ in native], [start for _, start in native])
        self._gathered = [s for s, _ in gathered]
        self._spans = [slice(start, start + s.query_len) for s, start in gathered]  # packed rows
        tables = [_blocks_to_read(s, self._block_size) for s in self._gathered]
        rows = self._inputs.put("rows", [block * self._stride for t in tables for block in t])
        self._tables = rows.split([len(table) for table in tables])  # each into a row view

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        if self._native is not None:
            self._native.store(layer, self._slots, key, value)
        else:
            self._store(layer, key, value)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if self._native is not None and self._has_native:
            self._native.attend(layer, output, query, scaling, window, softcap)
        for index, (sequence, span) in enumerate(zip(self._gathered, self._spans, strict=True)):
            if sequence.is_whole_prompt:
                keys, values = key[span], value[span]
            else:
                first = _first_key(sequence, window)
                keys = self._gather(2 * layer, index, first)
                values = self._gather(2 * layer + 1, index, first)
            mask = self._mask(sequence.query_len, len(keys), window, softcap, query.dtype)
            output[span] = _attend(query[span], keys, values, mask, scaling, softcap)
        return output

    def _is_native(self, sequence: SequenceSlice) -> bool:
        if self._native is None:
            return False
        return sequence.query_len == 1 or self._native.is_fast_for_prefill

    def _gather(self, row: int, index: int, first: int) -> torch.Tensor:
        """[num_keys, num_kv_heads, head_dim]: keys or values from token ``first`` to the last."""
        skipped = first // self._block_size
        blocks = self._row_views[row].index_select(0, self._tables[index][skipped:])
        start = skipped * self._block_size
        end = self._gathered[index].context_len
        return blocks.flatten(0, 1)[first - start : end - start]

    def _mask(
        self,
        num_queries: int,
        num_keys: int,
        window: int | None,
        softcap: float | None,
        dtype: torch.dtype,
    ) -> torch.Tensor | None:
        """Additive [num_queries, num_keys], or None where SDPA's own causal flag is enough.

        The last query is at the last key; each sees the keys up to its own, at most ``window``.
        """
        is_windowed = window is not None and window < num_keys
        if num_queries == 1:
            return None  # its keys begin at the window already
        if num_queries == num_keys and not is_windowed and softcap is None:
            return None
        size = window if window is not None and is_windowed else num_keys
        cached = self._masks.get((num_queries, num_keys, size))
        if cached is None:
            keys = torch.arange(num_keys, device=self._device)
            last = torch.arange(num_keys - num_queries, num_keys, device=self._device)[:, None]
            is_hidden = (keys > last) | (keys <= last - size)
            cached = torch.zeros(num_queries, num_keys, dtype=dtype, device=self._device)
            cached.masked_fill_(is_hidden, float("-inf"))
            self._masks[num_queries, num_keys, size] = cached
        return cached


def _blocks_to_read(sequence: SequenceSlice, block_size: int) -> list[int]:
    if sequence.is_whole_prompt:
        return []
    return sequence.block_table[: -(-sequence.context_len // block_size)]


def _first_key(sequence: SequenceSlice, window: int | None) -> int:
    """The first token that the first query of this step can see."""
    if window is None:
        return 0
    return max(0, sequence.context_len - sequence.query_len + 1 - window)


def _attend(
    query: torch.Tensor,  # [num_queries, num_heads, head_dim]
    key: torch.Tensor,  # [num_keys, num_kv_heads, head_dim]
    value: torch.Tensor,  # [num_keys, num_kv_heads, head_dim]
    mask: torch.Tensor | None,  # [num_queries, num_keys], added to the scores
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    """[num_queries, num_heads, head_dim]. KV heads take SDPA's batch dimension, so that the query
    heads of a group share their keys by a stride of 0 instead of a copy."""
    num_queries, num_heads, head_dim = query.shape
    num_keys, num_kv_heads, _ = key.shape
    group = num_heads // num_kv_heads
    grouped = query.view(num_queries, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    key, value = key.transpose(0, 1), value.transpose(0, 1)  # [num_kv_heads, num_keys, head_dim]
    if softcap is not None:
        output = _attend_softcapped(grouped, key, value, mask, scaling, softcap)
    elif num_queries == 1:  # the group takes the place of the queries: keys are read once
        packed = grouped.transpose(1, 2)  # [num_kv_heads, 1, group, head_dim]
        output = F.scaled_dot_product_attention(
            packed, key.unsqueeze(1), value.unsqueeze(1), scale=scaling
        ).transpose(1, 2)
    else:
        shape = (num_kv_heads, group, num_keys, head_dim)
        output = F.scaled_dot_product_attention(
            grouped,
            key.unsqueeze(1).expand(shape),
            value.unsqueeze(1).expand(shape),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
        )
    return output.permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_dim)


def _attend_softcapped(
    query: torch.Tensor,  # [num_kv_heads, group, num_queries, head_dim]
    key: torch.Tensor,  # [num_kv_heads, num_keys, head_dim]
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float,
) -> torch.Tensor:
    """``softcap * tanh(scores / softcap)`` before the softmax (Gemma 2, arXiv 2408.00118)."""
    rows = query.flatten(1, 2)  # [num_kv_heads, group * num_queries, head_dim]
    scores = torch.matmul(rows, key.transpose(1, 2)) * scaling
    scores = (torch.tanh(scores / softcap) * softcap).view(*query.shape[:3], -1)
    if mask is not None:
        scores = scores + mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    output = torch.matmul(weights.flatten(1, 2), value)
    return output.view(query.shape)
