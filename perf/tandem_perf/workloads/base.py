"""The seam between a workload and what runs it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tandem_perf.requests import Session


class WorkloadError(Exception):
    """A name, file or parameter that makes no workload; the message says which."""


@dataclass(frozen=True)
class TokenRange:
    """Token ids that prompts are made of; the default are ordinary text tokens of SmolLM2."""

    first: int = 1000
    last: int = 40_000  # exclusive


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """``speed`` of a trace: 2 sends it twice as fast. Longer prompts than ``max_prompt_tokens``
    (traces only) are left out.
    """

    token_range: TokenRange = TokenRange()
    speed: float = 1.0
    max_prompt_tokens: int | None = None
    ignore_eos: bool = True


class Workload(Protocol):
    """``sessions`` depends on the seed alone; it is endless unless the workload is a file."""

    @property
    def name(self) -> str: ...

    def sessions(self, seed: int) -> Iterator[Session]: ...


def length_class(num_tokens: int) -> str:
    """By prompt length, for workloads whose lengths are spread out."""
    for bound, name in ((256, "<=256"), (1024, "<=1k"), (4096, "<=4k"), (16_384, "<=16k")):
        if num_tokens <= bound:
            return name
    return ">16k"


def generator(seed: int, *stream: int) -> np.random.Generator:
    """An independent random stream for each (seed, stream)."""
    return np.random.default_rng([seed, *stream])
