"""Runs the model over one packed batch."""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch

from tandem.engine.attention_choice import choose_attention
from tandem.engine.batch import Batch
from tandem.engine.block_attention import BlockAttention, BlockKernelFactory, GraphShape
from tandem.engine.decode_graphs import CudaCapture, DecodeGraphs, graph_error, graph_sizes
from tandem.engine.forward_pass import ForwardPass
from tandem.engine.model import LOGIT_TOLERANCE, LoadedModel
from tandem.engine.step_inputs import FreshInputs, StaticInputs

_log = logging.getLogger(__name__)


class DecodeLimits(NamedTuple):
    """What steps of decoding will be at most."""

    num_sequences: int
    context_len: int


class ModelRunner:
    """One model on one slab. Owned by the thread that steps the engine.

    ``graph_limits``: capture CUDA graphs for decoding, if the attention allows it. All blocks of
    the slab must be free then, and the last one stays reserved: padding is written there.
    """

    def __init__(
        self, model: LoadedModel, slab: torch.Tensor, graph_limits: DecodeLimits | None = None
    ) -> None:
        assert slab.device == model.device
        self._model = model
        choice = choose_attention(slab, model.num_heads, model.attention_options, model.native)
        self._eager = ForwardPass(model.forward, choice.attention, FreshInputs(slab.device))
        self._graphs: DecodeGraphs | None = None
        if graph_limits is not None and choice.new_kernel is not None:
            self._graphs = self._capture(slab, choice.new_kernel, graph_limits)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits [len(batch.sample_rows), vocab_size], float32, on the model's device, valid until
        the next call.

        Writes the KV of every token of the batch. The head runs over the sampled rows only, so an
        empty ``sample_rows`` (a prefill chunk that is not the last) costs no head at all.
        """
        if self._graphs is not None and (size := self._graphs.size_for(batch)) is not None:
            return self._graphs.forward(batch, size).float()
        self._eager.start(batch)
        return self._eager.run().float()

    @torch.inference_mode()
    def _capture(
        self, slab: torch.Tensor, new_kernel: BlockKernelFactory, limits: DecodeLimits
    ) -> DecodeGraphs | None:
        """None, with a line in the log, if the model cannot be captured or computes otherwise."""
        block_size = slab.shape[3]
        table_width = -(-limits.context_len // block_size)

        def new_pass(size: int) -> ForwardPass:
            inputs = StaticInputs(slab.device)
            shape = GraphShape(size, table_width)
            attention = BlockAttention(slab, inputs, new_kernel, shape)
            return ForwardPass(self._model.forward, attention, inputs)

        sizes = graph_sizes(limits.num_sequences)
        try:
            graphs = DecodeGraphs(sizes, new_pass, CudaCapture(), len(slab) - 1, block_size)
            error = graph_error(graphs, self._eager, slab, limits.context_len)
        except Exception as reason:  # of a model's code that was never captured here: any
            _log.warning("no decode graphs: %s: %s", type(reason).__name__, reason)
            return None
        if not error <= LOGIT_TOLERANCE[slab.dtype]:  # also if it is NaN
            _log.warning("no decode graphs: replays are %.1g off", error)
            return None
        _log.info("decode graphs for %s sequences", ", ".join(map(str, graphs.sizes)))
        return graphs
