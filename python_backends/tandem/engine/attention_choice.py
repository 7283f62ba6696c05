"""Which attention an engine runs: the fastest whose results were checked when it started."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from tandem.engine.attention import AttentionOptions, PagedAttention
from tandem.engine.batch import Batch, SequenceSlice
from tandem.engine.block_attention import BlockAttention, BlockKernelFactory
from tandem.engine.kernels.native import NativeOperations
from tandem.engine.sequence_attention import SequenceAttention
from tandem.engine.step_inputs import FreshInputs

# Of the largest output. A key too many or too few is off by a multiple.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
_TABLES = ([4, 1, 3], [2])  # scattered blocks of the two sequences of the check
_NUM_BLOCKS = 6

_log = logging.getLogger(__name__)

KernelLoader = Callable[[torch.device], BlockKernelFactory]


@dataclass(frozen=True)
class AttentionChoice:
    attention: PagedAttention
    new_kernel: BlockKernelFactory | None  # of ``attention``; None: it cannot be captured


def _load_flashinfer(device: torch.device) -> BlockKernelFactory:
    from tandem.engine.kernels.flashinfer import FlashInferKernels

    return FlashInferKernels(importlib.import_module("flashinfer"), device)


def _load_varlen(device: torch.device) -> BlockKernelFactory:
    from tandem.engine.kernels.varlen import VarlenKernel

    return VarlenKernel


KERNELS: Mapping[str, KernelLoader] = {  # for 16-bit dtypes on a GPU, the fastest first
    "FlashInfer": _load_flashinfer,
    "torch varlen_attn": _load_varlen,
}


def choose_attention(
    slab: torch.Tensor,
    num_heads: int,
    options: Sequence[AttentionOptions],
    native: NativeOperations | None,
    kernels: Mapping[str, KernelLoader] | None = None,
) -> AttentionChoice:
    """``num_heads`` of queries; ``options``: what the layers of the model ask for. ``kernels``: to
    try; by default those that the device of the slab may have. One that raises, or differs from
    torch's attention on gathered keys, is passed over with a line in the log.
    """
    on_gpu = slab.device.type == "cuda"
    if kernels is None:
        kernels = KERNELS if on_gpu and slab.dtype != torch.float32 else {}
    for name, load in kernels.items():
        try:
            new_kernel = load(slab.device)
            error = kernel_error(new_kernel, slab, num_heads, options)
        except Exception as reason:  # optional code that was never here: whatever it raises
            _log.warning("attention: not %s: %s: %s", name, type(reason).__name__, reason)
            continue
        if not error <= _TOLERANCE[slab.dtype]:  # also if it is NaN
            _log.warning("attention: not %s: it is %.1g off", name, error)
            continue
        _log.info("attention: %s, one call a layer", name)
        return AttentionChoice(
            BlockAttention(slab, FreshInputs(slab.device), new_kernel), new_kernel
        )
    if on_gpu or kernels:
        _log.warning("attention: gathered for each sequence by itself, which is slow")
    return AttentionChoice(SequenceAttention(slab, native), None)


@torch.inference_mode()
def kernel_error(
    new_kernel: BlockKernelFactory,
    slab: torch.Tensor,
    num_heads: int,
    options: Sequence[AttentionOptions],
) -> float:
    """Largest difference to ``SequenceAttention``, of its largest output: prompts, chunks and
    decoding, for every kind of layer. The slab itself is not touched; what no token wrote is NaN,
    so that reading it shows.
    """
    _, _, _, block_size, num_kv_heads, head_dim = slab.shape
    shape = (_NUM_BLOCKS, 2, 2, block_size, num_kv_heads, head_dim)
    errors = [0.0]
    for scaling, window, softcap in dict.fromkeys(options):
        # A window that hides keys of a short context; its size is only a number to the kernel.
        window = None if window is None else min(window, block_size // 2 + 1)
        slabs = [slab.new_full(shape, torch.nan) for _ in range(2)]
        tested = BlockAttention(slabs[0], FreshInputs(slab.device), new_kernel)
        trusted = SequenceAttention(slabs[1])
        random = torch.Generator(slab.device).manual_seed(0)
        for batch in _check_batches(block_size):
            tested.start(batch)
            trusted.start(batch)
            for layer in range(2):
                query, key, value = (
                    torch.randn(
                        batch.num_tokens,
                        heads,
                        head_dim,
                        generator=random,
                        device=slab.device,
                        dtype=slab.dtype,
                    )
                    for heads in (num_heads, num_kv_heads, num_kv_heads)
                )
                actual, expected = (
                    attention.attend(layer, query, key, value, scaling, window, softcap).float()
                    for attention in (tested, trusted)
                )
                errors.append(((actual - expected).abs().max() / expected.abs().max()).item())
    # max() of Python may drop a NaN.
    return torch.tensor(errors).max().item()


def _check_batches(block_size: int) -> Iterator[Batch]:
    """Two whole prompts; a chunk beside a decoding sequence; both decoding."""
    context_lens = [0, 0]
    for query_lens in ((block_size + block_size // 2, 5), (block_size, 1), (1, 1)):
        positions: list[int] = []
        slots: list[int] = []
        parts: list[SequenceSlice] = []
        for index, (query_len, table) in enumerate(zip(query_lens, _TABLES, strict=True)):
            start = context_lens[index]
            context_lens[index] = end = start + query_len
            positions += range(start, end)
            slots += [
                table[at // block_size] * block_size + at % block_size for at in range(start, end)
            ]
            parts.append(SequenceSlice(query_len, end, table))
        yield Batch([0] * len(positions), positions, slots, parts)
