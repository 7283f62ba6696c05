"""What stands in for the calls that need a GPU: varlen_attn, FlashInfer, graph capture.

Plain torch, and nothing of a tensor's content passes through Python: so a tape of one run can be
played again on other content, which is what a CUDA graph does.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tandem.engine.decode_graphs import Captured


def varlen(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    key: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    num_splits: int,
) -> torch.Tensor:
    """``torch.nn.attention.varlen.varlen_attn`` as far as the kernel uses it."""
    for tensor in (cu_seq_q, cu_seq_k, seqused_k, block_table):
        assert tensor.dtype == torch.int32
    assert num_splits == 1 and enable_gqa
    block_size = key.shape[1]
    owner, position = _owners(query, cu_seq_q, seqused_k)
    keys = torch.arange(block_table.shape[1] * block_size)
    slots = block_table[owner][:, keys // block_size].long() * block_size + keys % block_size
    left, right = window_size
    is_seen = keys < seqused_k[owner][:, None]
    if right >= 0:
        is_seen = is_seen & (keys <= position[:, None] + right)
    if left >= 0:
        is_seen = is_seen & (keys >= position[:, None] - left)
    return _attend(query, key, value, slots, is_seen, scale, None)


class FakeWrapper:
    """``flashinfer.BatchPrefillWithPagedKVCacheWrapper`` as far as the kernel uses it."""

    def __init__(
        self,
        workspace: torch.Tensor,
        kv_layout: str,
        use_cuda_graph: bool = False,
        backend: str = "auto",
        **buffers: torch.Tensor,
    ) -> None:
        assert kv_layout == "NHD" and backend == "fa2"
        assert len(buffers) == (4 if use_cuda_graph else 0)
        self._buffers = list(buffers.values())

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **options: Any,
    ) -> None:
        assert options.pop("causal") and options.pop("disable_split_kv")
        self._shape = (num_heads, num_kv_heads, head_dim, page_size)
        self._options = options
        new = [qo_indptr, kv_indptr, kv_indices, last_page_len]
        if self._buffers:
            for buffer, tensor in zip(self._buffers, new, strict=True):
                buffer[: len(tensor)].copy_(tensor)
            assert len(self._buffers[0]) == len(qo_indptr)
        self._plan = self._buffers or new

    def run(self, query: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        num_heads, num_kv_heads, head_dim, page_size = self._shape
        assert query.is_contiguous() and query.shape[1:] == (num_heads, head_dim)
        assert cache[0].shape[1:] == (page_size, num_kv_heads, head_dim)
        starts, table_starts, indices, last_page_len = self._plan
        num_blocks = table_starts[1:] - table_starts[:-1]
        context_lens = (num_blocks - 1) * page_size + last_page_len
        owner, position = _owners(query, starts, context_lens)
        keys = torch.arange(len(indices) * page_size)
        at = (table_starts[owner][:, None] + keys // page_size).clamp(max=len(indices) - 1)
        slots = indices[at].long() * page_size + keys % page_size
        is_seen = keys <= position[:, None]
        window_left = self._options["window_left"]
        if window_left >= 0:
            is_seen = is_seen & (keys >= position[:, None] - window_left)
        options = self._options
        return _attend(
            query, *cache, slots, is_seen, options["sm_scale"], options["logits_soft_cap"]
        )


FLASHINFER = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=FakeWrapper)


class TapeCapture(TorchDispatchMode):
    """Captures the operations of a run; a replay computes them again from the same tensors, into
    the same tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_replays = 0

    def __call__(self, run: Callable[[], torch.Tensor]) -> Captured:
        run()  # the warm-up
        self._calls: list[tuple[Any, Any, Any, Any]] = []
        with self:
            logits = run()
        calls = self._calls

        def replay() -> None:
            self.num_replays += 1
            for function, args, kwargs, output in calls:
                for old, new in zip(
                    tree_leaves(output), tree_leaves(function(*args, **kwargs)), strict=True
                ):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)

        return Captured(logits, replay)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        self._calls.append((function, args, kwargs or {}, output))
        return output


def _owners(
    query: torch.Tensor, starts: torch.Tensor, context_lens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[num_tokens] sequence of every packed token, and its position there."""
    rows = torch.arange(len(query))
    owner = torch.bucketize(rows, starts[1:], right=True)
    return owner, context_lens[owner] - (starts[owner + 1] - rows)


def _attend(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    key: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value: torch.Tensor,
    slots: torch.Tensor,  # [num_tokens, num_keys]
    is_seen: torch.Tensor,  # [num_tokens, num_keys]; other slots may hold anything
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    group = query.shape[1] // key.shape[2]
    keys, values = (
        tensor.flatten(0, 1)[slots]
        .masked_fill(~is_seen[..., None, None], 0.0)
        .repeat_interleave(group, dim=2)
        for tensor in (key, value)
    )  # [num_tokens, num_keys, num_heads, head_dim]
    scores = torch.einsum("thd,tkhd->thk", query, keys) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    weights = scores.masked_fill(~is_seen[:, None], -torch.inf).softmax(dim=-1)
    return torch.einsum("thk,tkhd->thd", weights, values)
