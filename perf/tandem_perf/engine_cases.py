"""What an engine alone is asked to do when it is timed; the same for every engine."""

from __future__ import annotations

import random
from enum import StrEnum
from typing import Protocol

import msgspec

DECODE_SHAPES = ((1, 128), (8, 128), (8, 1024), (32, 128))  # batch, context
DECODE_STEPS = 24
PREFILL_TOKENS = 1024
_NUM_MIXED, _MIXED_OUTPUT = 32, 64
_FIRST_ID, _LAST_ID = 1000, 40000  # ordinary text tokens of SmolLM2


class Kind(StrEnum):
    DECODE = "decode"  # the median step once all prompts decode, ms
    PREFILL = "prefill"  # from the prompt to its first token, ms
    GENERATE = "generate"  # output tokens a second over all prompts


class Case(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    kind: Kind
    prompts: list[list[int]]
    max_tokens: int


class Engine(Protocol):
    """One engine in this process, without a server; greedy, EOS ignored."""

    def add(self, prompt_ids: list[int], max_tokens: int) -> None: ...

    def step(self) -> int:
        """Output tokens of this step; raises nothing when there is nothing to do."""

    @property
    def num_unfinished(self) -> int: ...


def cases(seed: int = 0) -> list[Case]:
    """Prompts of random tokens: nothing is found in a prefix cache."""
    source = random.Random(seed)

    def prompt(length: int) -> list[int]:
        return [source.randint(_FIRST_ID, _LAST_ID) for _ in range(length)]

    decode = [
        Case(
            name=f"decode step, batch {batch}, context {context}",
            kind=Kind.DECODE,
            prompts=[prompt(context) for _ in range(batch)],
            max_tokens=DECODE_STEPS + batch * context // 128 + 8,
        )
        for batch, context in DECODE_SHAPES
    ]
    prefill = Case(
        name=f"prefill of {PREFILL_TOKENS} tokens",
        kind=Kind.PREFILL,
        prompts=[prompt(PREFILL_TOKENS)],
        max_tokens=1,
    )
    lengths = [source.choice((32, 64, 128, 256, 512)) for _ in range(_NUM_MIXED)]
    generate = Case(
        name=f"{_NUM_MIXED} mixed prompts, {_MIXED_OUTPUT} tokens each",
        kind=Kind.GENERATE,
        prompts=[prompt(length) for length in lengths],
        max_tokens=_MIXED_OUTPUT,
    )
    return [prefill, *decode, generate]
