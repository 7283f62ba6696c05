"""Attention of a whole step in one call a layer, over the blocks where they lie: for GPUs."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from tandem.engine.attention import PagedAttention
from tandem.engine.batch import Batch, SequenceSlice
from tandem.engine.step_inputs import StepInputs


class GraphShape(NamedTuple):
    """What does not change between replays of a captured graph: it decodes one token each."""

    num_sequences: int
    table_width: int  # blocks of the longest sequence


class BlockKernel(Protocol):
    """Decoding sequences and chunks of prefills alike; queries are the last tokens of a context."""

    def start(self, sequences: list[SequenceSlice]) -> None:
        """Prepare a step; not part of a captured graph."""
        ...

    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim], packed in the order of ``start``
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """[num_tokens, num_heads, head_dim]; reads keys and values from the slab only."""
        ...


class BlockKernelFactory(Protocol):
    def __call__(
        self, slab: torch.Tensor, inputs: StepInputs, graph: GraphShape | None
    ) -> BlockKernel:
        """``graph``: every step will be of this shape, and ``attend`` gets captured."""
        ...


class BlockAttention(PagedAttention):
    def __init__(
        self,
        slab: torch.Tensor,
        inputs: StepInputs,
        new_kernel: BlockKernelFactory,
        graph: GraphShape | None = None,
    ) -> None:
        super().__init__(slab, inputs)
        self._kernel = new_kernel(slab, inputs, graph)

    def start(self, batch: Batch) -> None:
        super().start(batch)
        self._kernel.start(batch.sequences)

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
        self._store(layer, key, value)
        return self._kernel.attend(layer, query, scaling, window, softcap).contiguous()
