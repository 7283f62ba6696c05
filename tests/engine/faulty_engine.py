"""The engine program with a fault: a prompt full of ``POISON`` breaks the step that it is in, as a
device error does.
"""

from typing import Any

import torch

from tandem.engine import process
from tandem.engine.batch import Batch
from tandem.engine.model_runner import ModelRunner

POISON = 7
NUM_POISON = 12
_forward = ModelRunner.forward


def forward(self: ModelRunner, batch: Batch) -> torch.Tensor:
    if list(batch.token_ids).count(POISON) >= NUM_POISON:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return _forward(self, batch)


if __name__ == "__main__":
    patched: Any = ModelRunner
    patched.forward = forward
    process.main()
