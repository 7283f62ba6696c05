"""Where the engine's tests run: on the CPU, and on a GPU if this machine has one."""

from __future__ import annotations

import pytest
import torch

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
