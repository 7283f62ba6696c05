"""The slab as a tensor: a view on exported memory that every layer of the model uses."""

from __future__ import annotations

import mmap

import torch

from tandem.kv.layout import KVLayout
from tandem.transport.base import DeviceSlab, Slab

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def slab_tensor(buffer: memoryview | mmap.mmap, layout: KVLayout, num_blocks: int) -> torch.Tensor:
    """[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim] on ``buffer``, no copy.

    The tensor keeps ``buffer`` alive; the buffer must be writable and hold all blocks.
    """
    num_bytes = num_blocks * layout.block_bytes
    assert memoryview(buffer).nbytes >= num_bytes, "the buffer is smaller than the slab"
    flat = torch.frombuffer(buffer, dtype=torch.uint8, count=num_bytes)
    return flat.view(TORCH_DTYPES[layout.dtype_name]).view(num_blocks, *layout.block_shape)


def tensor_of(slab: Slab, layout: KVLayout) -> torch.Tensor:
    """As ``slab_tensor``, on a region's slab in host or device memory."""
    if isinstance(slab, DeviceSlab):
        flat = torch.as_tensor(slab, device=torch.device("cuda", slab.device))
        return flat.view(TORCH_DTYPES[layout.dtype_name]).view(len(slab), *layout.block_shape)
    return slab_tensor(slab.data, layout, len(slab))


def empty_slab(layout: KVLayout, num_blocks: int, device: torch.device) -> torch.Tensor:
    """A slab in memory of its own, of the same shape as ``slab_tensor``."""
    dtype = TORCH_DTYPES[layout.dtype_name]
    return torch.zeros(num_blocks, *layout.block_shape, dtype=dtype, device=device)
