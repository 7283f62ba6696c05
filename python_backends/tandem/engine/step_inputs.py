"""Lists of a step as tensors on the model's device, without a wait of the host for the copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class StepInputs(Protocol):
    """Where the index tensors of a step lie."""

    def put(
        self, name: str, values: Sequence[int], dtype: torch.dtype = torch.int64
    ) -> torch.Tensor:
        """``values`` on the device, [len(values)]."""
        ...


class FreshInputs:
    """New tensors in every step, of any length."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def put(
        self, name: str, values: Sequence[int], dtype: torch.dtype = torch.int64
    ) -> torch.Tensor:
        return device_tensor(values, self._device, dtype)


class StaticInputs:
    """The same tensor for a name in every step, and so of the same length: what a captured graph
    reads when it is replayed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: dict[str, torch.Tensor] = {}

    def put(
        self, name: str, values: Sequence[int], dtype: torch.dtype = torch.int64
    ) -> torch.Tensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            tensor = self._tensors[name] = device_tensor(values, self._device, dtype)
        else:
            assert tensor.dtype == dtype and len(tensor) == len(values), name
            tensor.copy_(_host_tensor(values, self._device, dtype), non_blocking=True)
        return tensor


def device_tensor(
    values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """[len(values)], in one copy that the host does not wait for."""
    return _host_tensor(values, device, dtype).to(device, non_blocking=True)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host, in one copy that the host does not wait for."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def _host_tensor(values: Sequence[float], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Pinned for a GPU: torch gives that memory to nobody else before the copy from it is done."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type != "cpu")
