"""The model over one packed batch, with the place where its inputs lie."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tandem.engine.attention import PagedAttention
from tandem.engine.batch import Batch
from tandem.engine.step_inputs import StepInputs

# Token ids, positions, rows to compute the logits of, attention → logits [num_rows, vocab_size].
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, PagedAttention], torch.Tensor]


class ForwardPass:
    """``start`` copies a batch to the device, ``run`` computes it there and waits for nothing."""

    def __init__(self, forward: Forward, attention: PagedAttention, inputs: StepInputs) -> None:
        self._forward = forward
        self._attention = attention
        self._inputs = inputs

    def start(self, batch: Batch) -> None:
        self._attention.start(batch)
        put = self._inputs.put
        self._token_ids = put("token_ids", batch.token_ids)
        self._positions = put("positions", batch.positions)
        self._sample_rows = put("sample_rows", batch.sample_rows)

    def run(self) -> torch.Tensor:
        """Logits [len(batch.sample_rows), vocab_size] in the model's dtype."""
        return self._forward(self._token_ids, self._positions, self._sample_rows, self._attention)
