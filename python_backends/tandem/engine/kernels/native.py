"""The compiled kernels on CPU tensors: the operations of a layer, and paged attention."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from tandem.engine.batch import SequenceSlice
from tandem.engine.kernels.build import load_library

_SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}
_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_AMX_TILE = 16
_AMX_HEAD_DIMS = range(32, 257, 32)


class _Cache(ctypes.Structure):
    _fields_ = [
        ("keys", _POINTER),
        ("values", _POINTER),
        ("block_stride", _INT),
        ("block_size", _INT),
        ("num_kv_heads", _INT),
        ("head_dim", _INT),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        ("query_starts", _POINTER),
        ("query_lens", _POINTER),
        ("context_lens", _POINTER),
        ("tables", _POINTER),
        ("table_starts", _POINTER),
        ("num_sequences", _INT),
        ("num_heads", _INT),
        ("query_stride", _INT),
        ("window", _INT),
        ("scaling", _FLOAT),
        ("softcap", _FLOAT),
    ]


_OPERATIONS = {
    "rms_norm": [_POINTER] * 4 + [_INT] * 4 + [_FLOAT],
    "rotate": [_POINTER] * 3 + [_INT] * 4,
    "silu_mul": [_POINTER] * 2 + [_INT] * 2,
    "store_kv": [_POINTER] * 5 + [_INT] * 3,
    "attention": [_POINTER] * 4,
}


@cache
def _library() -> ctypes.CDLL | None:
    return load_library()


def native_operations(device: torch.device, dtype: torch.dtype) -> NativeOperations | None:
    """None where torch has to compute: on a GPU, in float16, or without a compiler."""
    if device.type != "cpu" or dtype not in _SUFFIXES:
        return None
    library = _library()
    return None if library is None else NativeOperations(library, dtype)


class NativeOperations:
    """``Operations`` for CPU tensors of one dtype, and the attention that goes with them."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        suffix = _SUFFIXES[dtype]
        functions = {name: getattr(library, f"{name}_{suffix}") for name in _OPERATIONS}
        for name, types in _OPERATIONS.items():
            functions[name].argtypes, functions[name].restype = types, None
        self._rms_norm = functions["rms_norm"]
        self._rotate = functions["rotate"]
        self._silu_mul = functions["silu_mul"]
        self.store_kv = functions["store_kv"]
        self.attention = functions["attention"]
        self.attention_amx: Any = None
        self._linears: dict[torch.dtype, Any] = {}  # by the dtype of the weights
        library.enable_amx.restype = ctypes.c_bool
        if dtype == torch.bfloat16 and library.enable_amx():
            self.attention_amx = library.attention_amx
            self.attention_amx.argtypes, self.attention_amx.restype = [_POINTER] * 4, None
            self._linears = {
                torch.int8: library.linear_int8_amx,
                torch.bfloat16: library.linear_bf16_amx,
            }
            for linear in self._linears.values():
                linear.argtypes, linear.restype = [_POINTER] * 5 + [_INT] * 3, None

    def rms_norm(self, rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        size = rows.shape[-1]
        output = torch.empty(rows.shape, dtype=rows.dtype)
        flat, to = _rows(rows), output.view(-1, size)
        self._rms_norm(
            to.data_ptr(),
            flat.data_ptr(),
            None,
            weight.data_ptr(),
            len(flat),
            size,
            flat.stride(0),
            size,
            eps,
        )
        return output

    def add_rms_norm(
        self, residual: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        num_tokens, size = rows.shape
        output = torch.empty_like(rows)
        self._rms_norm(
            output.data_ptr(),
            rows.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            num_tokens,
            size,
            size,
            size,
            eps,
        )
        return output

    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self._rotate(
            heads.data_ptr(), cos.data_ptr(), sin.data_ptr(), *heads.shape, heads.stride(0)
        )

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        num_tokens, width = gate_up.shape
        output = torch.empty(num_tokens, width // 2, dtype=gate_up.dtype)
        self._silu_mul(output.data_ptr(), gate_up.data_ptr(), num_tokens, width // 2)
        return output

    def has_tiles_for(self, weight: torch.Tensor) -> bool:
        """``linear`` can compute with a weight of this shape [outputs, inputs]."""
        num_outputs, num_inputs = weight.shape
        is_tiled = num_outputs % _AMX_TILE == 0 and num_inputs % (2 * _AMX_TILE) == 0
        return bool(self._linears) and is_tiled

    @staticmethod
    def pack_tiles(weight: torch.Tensor) -> torch.Tensor:
        """[outputs, inputs], int8 or bfloat16, in the order of the tiles that multiply it."""
        num_outputs, num_inputs = weight.shape
        tile = _AMX_TILE
        tiles = weight.view(num_outputs // tile, tile, num_inputs // (2 * tile), tile, 2)
        return tiles.permute(0, 2, 3, 1, 4).contiguous()

    def linear(
        self,
        output: torch.Tensor,  # [..., outputs] bfloat16
        rows: torch.Tensor,  # [..., inputs] bfloat16, contiguous
        packed: torch.Tensor,  # of ``pack_tiles``
        scales: torch.Tensor | None,  # [outputs] float
        bias: torch.Tensor | None,  # [outputs] float
    ) -> None:
        self._linears[packed.dtype](
            output.data_ptr(),
            rows.data_ptr(),
            packed.data_ptr(),
            None if scales is None else scales.data_ptr(),
            None if bias is None else bias.data_ptr(),
            rows.numel() // rows.shape[-1],
            rows.shape[-1],
            output.shape[-1],
        )


def _rows(rows: torch.Tensor) -> torch.Tensor:
    """[n, size], rows apart by a constant stride; a copy only if there is no such view."""
    if rows.dim() == 2 and rows.stride(1) == 1:
        return rows
    return rows.reshape(-1, rows.shape[-1])


class NativeAttention:
    """Attention over the blocks of one slab, read in place. Owned by the engine's thread."""

    def __init__(self, operations: NativeOperations, slab: torch.Tensor) -> None:
        _, num_layers, _, block_size, num_kv_heads, head_dim = slab.shape
        self._operations = operations
        self._slab = slab  # kept alive: the kernels have its addresses
        self._caches = [
            _Cache(
                slab[0, layer, 0].data_ptr(),
                slab[0, layer, 1].data_ptr(),
                slab.stride(0),
                block_size,
                num_kv_heads,
                head_dim,
            )
            for layer in range(num_layers)
        ]
        fits_tiles = head_dim in _AMX_HEAD_DIMS and block_size % _AMX_TILE == 0
        self._amx = operations.attention_amx if fits_tiles else None

    @property
    def is_fast_for_prefill(self) -> bool:
        """Torch's own attention is faster for many query tokens, unless there are tiles."""
        return self._amx is not None

    def start(self, sequences: list[SequenceSlice], query_starts: list[int]) -> None:
        """The sequences to attend in this step, and where their rows begin in the packed batch."""
        tables = [block for s in sequences for block in s.block_table]
        starts, end = [], 0
        for sequence in sequences:
            starts.append(end)
            end += len(sequence.block_table)
        lists = (
            query_starts,
            [s.query_len for s in sequences],
            [s.context_len for s in sequences],
            tables,
            starts,
        )
        self._arrays = [torch.tensor(values, dtype=torch.int64) for values in lists]
        self._step = _Step(*(array.data_ptr() for array in self._arrays), len(sequences))

    def store(
        self,
        layer: int,
        slots: torch.Tensor,  # [num_tokens] int64, counted in tokens from the layer's first
        key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        value: torch.Tensor,  # the same shape
    ) -> None:
        size = key.shape[1] * key.shape[2]
        strides = (key.stride(0), key.shape[2], 1)
        if key.stride() != strides or value.stride() != strides:
            key, value = key.contiguous(), value.contiguous()
        cache = self._caches[layer]
        self._operations.store_kv(
            cache.keys,
            cache.values,
            key.data_ptr(),
            value.data_ptr(),
            slots.data_ptr(),
            len(key),
            size,
            key.stride(0),
        )

    def attend(
        self,
        layer: int,
        output: torch.Tensor,  # [num_tokens, num_heads, head_dim]; only rows of ``start`` change
        query: torch.Tensor,  # the same shape, may be a slice of columns
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> None:
        if query.stride()[1:] != (query.shape[2], 1):
            query = query.contiguous()
        step = self._step
        step.num_heads = query.shape[1]
        step.query_stride = query.stride(0)
        step.window = window or 0
        step.scaling = scaling
        step.softcap = softcap or 0.0
        amx = None if softcap else self._amx
        attention = amx or self._operations.attention
        attention(
            output.data_ptr(),
            query.data_ptr(),
            ctypes.byref(self._caches[layer]),
            ctypes.byref(step),
        )
