"""Words shared by every part: roles, finish reasons, sampling parameters, load."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

TRANSPORTS = ("shm", "cuda_ipc", "nixl")  # names of what moves KV between engines


class Role(StrEnum):
    """What a worker is given to do. Any engine can do both phases."""

    PREFILL = "prefill"
    DECODE = "decode"


class Policy(StrEnum):
    """How the router chooses a path: by predicted cost, by the length of the prompt, always remote
    prefill, or never (= colocated)."""

    AUTO = "auto"
    LENGTH = "length"
    ALWAYS = "always"
    NEVER = "never"


class Quantization(StrEnum):
    """How an engine keeps its weights; the KV cache and all sums stay as they are."""

    NONE = "none"
    INT8 = "int8"


class FinishReason(StrEnum):
    """``TIMEOUT`` is the orchestrator's: the request's own timeout ended its output."""

    STOP = "stop"
    LENGTH = "length"
    TIMEOUT = "timeout"


class PriorityClass(StrEnum):
    """What is bounded together in the queue: the sign of ``priority``, most urgent first."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"

    @classmethod
    def of(cls, priority: int) -> PriorityClass:
        return cls.HIGH if priority < 0 else cls.LOW if priority > 0 else cls.NORMAL

    @property
    def order(self) -> int:
        return list(PriorityClass).index(self)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the next token is chosen. A pure value: same logits, params and position, same token.

    ``temperature`` 0 is greedy. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off.
    ``stop_token_ids`` holds EOS as well, unless the user asked to ignore it.
    """

    max_tokens: Annotated[int, Meta(ge=1)]
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    temperature: Annotated[float, Meta(ge=0, le=100)] = 0.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=0)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] = 1.0
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: bool = False


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker tells the router with every message of the stream plane."""

    role: Role
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0  # prompt tokens not computed yet, over all its sequences
    num_free_blocks: int = 0  # free + cached
    num_blocks: int = 0
    max_num_seqs: int = 0  # num_running and num_waiting it takes in all
    step_s: float = 0.0  # what its next step takes, as it learnt
    prefill_tokens_per_s: float = 0.0  # beside what decodes; 0: that takes all of max_itl_ms
    pull_tokens_per_s: float = 0.0  # 0: it has pulled nothing yet


class WorkerLoad(msgspec.Struct, frozen=True):
    """The newest load that a worker told."""

    worker: str
    incarnation: str
    load: Load
    heard_s: float
