"""Runs the model over one packed batch."""

from __future__ import annotations

import torch

from tandem.engine.attention import PagedAttention, device_tensor
from tandem.engine.batch import Batch
from tandem.engine.model import LoadedModel


class ModelRunner:
    """One model on one slab. Owned by the thread that steps the engine."""

    def __init__(self, model: LoadedModel, slab: torch.Tensor) -> None:
        assert slab.device == model.device
        self._model = model
        self._attention = PagedAttention(slab, model.native)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits [len(batch.sample_rows), vocab_size], float32, on the model's device.

        Writes the KV of every token of the batch. The head runs over the sampled rows only, so an
        empty ``sample_rows`` (a prefill chunk that is not the last) costs no head at all.
        """
        device = self._model.device
        self._attention.start(batch)
        logits = self._model.forward(
            device_tensor(batch.token_ids, device),
            device_tensor(batch.positions, device),
            device_tensor(batch.sample_rows, device),
            self._attention,
        )
        return logits.float()
