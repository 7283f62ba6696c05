"""FlashInfer's paged attention, where it is installed: any block size, softcap, CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from tandem.engine.batch import SequenceSlice
from tandem.engine.block_attention import GraphShape
from tandem.engine.step_inputs import StepInputs

_WORKSPACE_BYTES = 128 << 20


class _Options(NamedTuple):
    """What a plan is made for, beside the step itself."""

    num_heads: int
    scaling: float
    window: int | None
    softcap: float | None


class FlashInferKernels:
    """Makes kernels that share a workspace: they run one after the other, on one stream.

    ``library`` is the module ``flashinfer``, or what a test puts in its place.
    """

    def __init__(self, library: Any, device: torch.device) -> None:
        self._library = library
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def __call__(
        self, slab: torch.Tensor, inputs: StepInputs, graph: GraphShape | None
    ) -> FlashInferKernel:
        new_wrapper = self._library.BatchPrefillWithPagedKVCacheWrapper
        return FlashInferKernel(slab, graph, partial(new_wrapper, self._workspace, "NHD"))


class FlashInferKernel:
    """A wrapper for each kind of layer: the plan of a step depends on its window and softcap."""

    def __init__(
        self, slab: torch.Tensor, graph: GraphShape | None, new_wrapper: Callable[..., Any]
    ) -> None:
        self._new_wrapper = new_wrapper
        self._graph = graph
        self._device, self._dtype = slab.device, slab.dtype
        self._block_size, self._num_kv_heads, self._head_dim = slab.shape[3:]
        # [num_blocks, block_size, num_kv_heads, head_dim] of each layer, "NHD"
        self._caches = [(slab[:, layer, 0], slab[:, layer, 1]) for layer in range(slab.shape[1])]
        self._wrappers: dict[_Options, Any] = {}

    def start(self, sequences: list[SequenceSlice]) -> None:
        """A new plan for every kind of layer seen so far; the lists stay on the host for it."""
        size = self._block_size
        tables = [s.block_table[: -(-s.context_len // size)] for s in sequences]
        self._plan = (
            _host(accumulate((s.query_len for s in sequences), initial=0)),
            _host(accumulate(map(len, tables), initial=0)),
            _host(block for table in tables for block in table),
            _host((s.context_len - 1) % size + 1 for s in sequences),  # tokens in the last block
        )
        for options, wrapper in self._wrappers.items():
            self._plan_for(wrapper, options)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        options = _Options(query.shape[1], scaling, window, softcap)
        wrapper = self._wrappers.get(options)
        if wrapper is None:  # in the first step; before a graph is captured, in its warm-up
            wrapper = self._wrappers[options] = self._wrapper()
            self._plan_for(wrapper, options)
        output: torch.Tensor = wrapper.run(query.contiguous(), self._caches[layer])
        return output

    def _plan_for(self, wrapper: Any, options: _Options) -> None:
        wrapper.plan(
            *self._plan,
            options.num_heads,
            self._num_kv_heads,
            self._head_dim,
            self._block_size,
            causal=True,
            sm_scale=options.scaling,
            window_left=-1 if options.window is None else options.window - 1,
            logits_soft_cap=options.softcap,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
            disable_split_kv=True,  # else the split, and so the rounding, depends on the batch
        )

    def _wrapper(self) -> Any:
        if self._graph is None:
            return self._new_wrapper(backend="fa2")
        rows, width = self._graph
        sizes = {
            "qo_indptr_buf": rows + 1,
            "paged_kv_indptr_buf": rows + 1,
            "paged_kv_indices_buf": rows * width,
            "paged_kv_last_page_len_buf": rows,
        }
        buffers = {
            name: torch.zeros(size, dtype=torch.int32, device=self._device)
            for name, size in sizes.items()
        }
        return self._new_wrapper(backend="fa2", use_cuda_graph=True, **buffers)


def _host(values: Iterable[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32)
