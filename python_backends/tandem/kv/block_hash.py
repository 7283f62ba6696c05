"""Hashes that name a full block by its tokens and all tokens before it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

DIGEST_BYTES = 16
ROOT = b""  # the parent of a first block


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The hash of one block: blake2b over its parent's hash and its tokens (uint32, LE)."""
    tokens = struct.pack(f"<{len(token_ids)}I", *token_ids)
    return blake2b(parent + tokens, digest_size=DIGEST_BYTES).digest()


def salted_root(salt: str) -> bytes:
    """The parent of a first block under this salt: no two salts share a block, "" is unsalted."""
    return blake2b(salt.encode(), digest_size=DIGEST_BYTES).digest() if salt else ROOT


def block_hashes(token_ids: Sequence[int], block_size: int, root: bytes = ROOT) -> list[bytes]:
    """The hash of each full block; two equal hashes mean two equal prefixes under one root.

    A last block that is not full has no hash: the result has ``len(token_ids) // block_size``.
    """
    hashes: list[bytes] = []
    parent = root
    for end in range(block_size, len(token_ids) + 1, block_size):
        parent = block_hash(parent, token_ids[end - block_size : end])
        hashes.append(parent)
    return hashes
