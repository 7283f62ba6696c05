"""CUDA graphs of decode steps: one launch instead of hundreds, for a few batch sizes.

::

    batch of 5 ── padded to 8 ──► static inputs ── replay ──► logits [8, vocab] ──► first 5 rows

A row of padding is a sequence of one token in the scratch block: it writes there, and reads only
what it wrote. Any other step (a prefill in it, more sequences) is not for a graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tandem.engine.batch import Batch, SequenceSlice
from tandem.engine.forward_pass import ForwardPass

_log = logging.getLogger(__name__)


class Captured(NamedTuple):
    logits: torch.Tensor  # written by every replay
    replay: Callable[[], None]


Capture = Callable[[Callable[[], torch.Tensor]], Captured]


def graph_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, … and ``max_num_seqs``: at most half of a batch is padding."""
    powers = [1 << power for power in range(max_num_seqs.bit_length())]
    return sorted({*powers, max_num_seqs})


def is_plain_decode(batch: Batch) -> bool:
    """Each sequence computes one token and samples the next."""
    return batch.num_tokens == len(batch.sequences) == len(batch.sample_rows) > 0


def pad_decode(batch: Batch, size: int, scratch_slot: int, block_size: int) -> Batch:
    """``batch`` with rows of padding up to ``size``."""
    missing = size - len(batch.sequences)
    padding = SequenceSlice(1, 1, [scratch_slot // block_size])
    return Batch(
        token_ids=batch.token_ids + [0] * missing,
        positions=batch.positions + [0] * missing,
        slot_mapping=batch.slot_mapping + [scratch_slot] * missing,
        sequences=batch.sequences + [padding] * missing,
        sample_rows=list(range(size)),
    )


@dataclass(frozen=True)
class _Graph:
    forward_pass: ForwardPass  # its static inputs are the graph's
    captured: Captured


class DecodeGraphs:
    """``new_pass`` makes a forward pass on static inputs for a number of sequences.

    Owned by the thread that runs the model; the logits of a step are overwritten by the next.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        new_pass: Callable[[int], ForwardPass],
        capture: Capture,
        scratch_block: int,
        block_size: int,
    ) -> None:
        self._block_size = block_size
        self._scratch_slot = scratch_block * block_size
        self._graphs: dict[int, _Graph] = {}
        for size in sorted(sizes, reverse=True):  # smaller ones fit into the largest's memory
            forward_pass = new_pass(size)
            forward_pass.start(self._pad(Batch([], [], []), size))
            self._graphs[size] = _Graph(forward_pass, capture(forward_pass.run))

    @property
    def sizes(self) -> list[int]:
        return sorted(self._graphs)

    def size_for(self, batch: Batch) -> int | None:
        """Of the smallest graph that takes this batch; None if there is none."""
        if not is_plain_decode(batch):
            return None
        return next((size for size in self.sizes if size >= len(batch.sequences)), None)

    def forward(self, batch: Batch, size: int) -> torch.Tensor:
        """Logits [len(batch.sequences), vocab_size]; ``size`` as ``size_for`` says."""
        graph = self._graphs[size]
        graph.forward_pass.start(self._pad(batch, size))
        graph.captured.replay()
        return graph.captured.logits[: len(batch.sequences)]

    def _pad(self, batch: Batch, size: int) -> Batch:
        return pad_decode(batch, size, self._scratch_slot, self._block_size)


class CudaCapture:
    """``Capture`` on the current GPU; all graphs share one pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], torch.Tensor]) -> Captured:
        current = torch.cuda.current_stream()
        with torch.cuda.stream(current):  # a capture that fails leaves its own stream behind
            return self._capture(run, current)

    def _capture(self, run: Callable[[], torch.Tensor], current: torch.cuda.Stream) -> Captured:
        warm_up = torch.cuda.Stream()
        warm_up.wait_stream(current)
        with torch.cuda.stream(warm_up):
            run()  # what happens in a first call only must not be in the graph
        current.wait_stream(warm_up)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile, for a pull.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = run()
        return Captured(logits, graph.replay)


def graph_error(
    graphs: DecodeGraphs, eager: ForwardPass, slab: torch.Tensor, max_context_len: int
) -> float:
    """Largest difference between replays and the eager pass, of the largest logit, over all graphs.

    Overwrites blocks of the slab, which must all be free.
    """
    num_blocks, block_size = slab.shape[0] - 1, slab.shape[3]  # the last one is for scratch
    context_len = min(block_size + 3, max_context_len)
    per_sequence = -(-context_len // block_size)
    errors = [0.0]
    for size in graphs.sizes:
        count = min(max(1, size - 1), num_blocks // per_sequence)  # with padding, where it can be
        slab[: count * per_sequence].normal_()
        tables = [[i * per_sequence + j for j in range(per_sequence)] for i in range(count)]
        last = context_len - 1
        batch = Batch(
            token_ids=[1 + i for i in range(count)],
            positions=[last] * count,
            slot_mapping=[t[last // block_size] * block_size + last % block_size for t in tables],
            sequences=[SequenceSlice(1, context_len, table) for table in tables],
            sample_rows=list(range(count)),
        )
        actual = graphs.forward(batch, size).float()
        eager.start(batch)
        expected = eager.run().float()
        errors.append(((actual - expected).abs().max() / expected.abs().max()).item())
    return torch.tensor(errors).max().item()
