"""Prompts of an exact number of random token ids."""

from __future__ import annotations

from array import array

import numpy as np

from tandem_perf.workloads.base import TokenRange


def random_ids(rng: np.random.Generator, num_tokens: int, token_range: TokenRange) -> array[int]:
    ids = rng.integers(token_range.first, token_range.last, num_tokens, dtype=np.int32)
    return array("i", ids.tobytes())
