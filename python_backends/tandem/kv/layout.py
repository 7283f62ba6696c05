"""How the KV cache of one engine lies in its slab.

::

    slab  [num_blocks, num_layers, 2 (K, V), block_size, num_kv_heads, head_dim]
           └ one block of all layers is one contiguous range: one transfer descriptor ┘
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.errors import ConfigError

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class KVLayout:
    """Shape and type of one block; two engines exchange blocks only if these are equal."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens
    dtype_name: str  # float32 | bfloat16 | float16

    def __post_init__(self) -> None:
        if self.dtype_name not in _ITEM_BYTES:
            known = ", ".join(_ITEM_BYTES)
            raise ConfigError(f"KV cache dtype {self.dtype_name!r}: not one of {known}")
        if min(self.block_shape) < 1:
            raise ConfigError(f"KV cache block {self.block_shape}: every size must be at least 1")

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        return (self.num_layers, 2, self.block_size, self.num_kv_heads, self.head_dim)

    @property
    def block_bytes(self) -> int:
        num_elements = 2 * self.num_layers * self.block_size * self.num_kv_heads * self.head_dim
        return num_elements * _ITEM_BYTES[self.dtype_name]

    def num_blocks_in(self, num_bytes: int) -> int:
        return num_bytes // self.block_bytes

    def describe(self) -> str:
        """One line that names the inner order as well; part of the model fingerprint."""
        return (
            f"block[layer={self.num_layers},kv=2,token={self.block_size},"
            f"head={self.num_kv_heads},dim={self.head_dim}]:{self.dtype_name}"
        )
