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
        self._attention = PagedAttention(slab)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits [len(batch.sample_rows), vocab_size], float32, on the model's device.

        Writes the KV of every token of the batch. The head runs over the sampled rows only, so an
        empty ``sample_rows`` (a prefill chunk that is not the last) costs no head at all.
        """
        device = self._model.device
        self._attention.start(batch)
        output = self._model.causal_lm(
            input_ids=device_tensor(batch.token_ids, device)[None],
            position_ids=device_tensor(batch.positions, device)[None],
            use_cache=False,
            logits_to_keep=device_tensor(batch.sample_rows, device),
            paged_attention=self._attention,
        )
        logits: torch.Tensor = output.logits[0]
        return logits.float()
