"""What one engine step costs at least: the roofline of its bytes and its FLOPs. Torch-free.

A step reads every weight it uses once and moves the KV of every sequence once; a matrix product
takes 2 FLOPs a parameter and token. Dense decoder-only models.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """``body_params``: all but embedding and head. One dtype for weights and KV cache."""

    body_params: int
    head_params: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    item_bytes: int

    @property
    def kv_token_bytes(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.item_bytes


@dataclass(frozen=True)
class Slice:
    """``query_len`` tokens of one sequence; its context after the step, those included."""

    query_len: int
    context_len: int

    @property
    def num_pairs(self) -> int:
        """(query, visible key) pairs under the causal mask."""
        before = self.context_len - self.query_len
        return self.query_len * before + self.query_len * (self.query_len + 1) // 2


@dataclass(frozen=True)
class Work:
    """The least a step moves and computes."""

    num_bytes: int
    flops: int


@dataclass(frozen=True)
class Peaks:
    """What this machine was measured to reach, with the engine's threads and dtype."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True)
class Floor:
    seconds: float
    reason: str  # "bytes" | "FLOPs"; of several steps the one that takes more of the time


def step_work(shape: ModelShape, slices: Iterable[Slice], num_sampled: int) -> Work:
    """Work of one step. Attention: QKᵀ and AV, 2 · 2 FLOPs per pair, head and dimension."""
    parts = list(slices)
    num_tokens = sum(part.query_len for part in parts)
    pairs = sum(part.num_pairs for part in parts)
    weights = shape.body_params + (shape.head_params if num_sampled else 0)
    kv_bytes = sum(part.context_len for part in parts) * shape.kv_token_bytes
    matmul = 2 * (shape.body_params * num_tokens + shape.head_params * num_sampled)
    attention = 4 * pairs * shape.num_layers * shape.num_heads * shape.head_dim
    return Work(weights * shape.item_bytes + kv_bytes, matmul + attention)


def floor_of(steps: Sequence[Work], peaks: Peaks) -> Floor:
    """Each step takes its bytes or its FLOPs, whichever is longer; steps add up."""
    bytes_s = [step.num_bytes / peaks.bytes_per_s for step in steps]
    flops_s = [step.flops / peaks.flops_per_s for step in steps]
    longest = [max(pair) for pair in zip(bytes_s, flops_s, strict=True)]
    by_bytes = sum(b for b, f in zip(bytes_s, flops_s, strict=True) if b >= f)
    return Floor(sum(longest), "bytes" if by_bytes >= sum(longest) / 2 else "FLOPs")


def prefill_steps(shape: ModelShape, prompt_len: int, chunk: int) -> list[Work]:
    """A prompt in chunks; only the last one computes the head, for one token."""
    ends = [*range(chunk, prompt_len, chunk), prompt_len]
    starts = [0, *ends[:-1]]
    return [
        step_work(shape, [Slice(end - start, end)], num_sampled=int(end == prompt_len))
        for start, end in zip(starts, ends, strict=True)
    ]


def decode_step(shape: ModelShape, batch: int, context_len: int) -> Work:
    """One token for each of ``batch`` sequences, whose KV is ``context_len`` long after it."""
    return step_work(shape, [Slice(1, context_len)] * batch, num_sampled=batch)
