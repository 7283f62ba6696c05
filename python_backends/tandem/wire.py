"""Every message between processes. msgpack through msgspec: typed, validated, never pickle.

=============  =========================  ===============================================
channel        who                        messages
=============  =========================  ===============================================
control plane  llm → pool (BLS)           ``SequenceSpec`` (+ a KV handle)
control plane  pool → llm                 ``PrefillReply`` (+ a KV handle) or ``Admitted``
stream plane   engine → orchestrator      ``StepMessage``
stream plane   shim → orchestrators       ``EngineEnded``
stream plane   orchestrator → engine      ``Ping``, ``Cancel``, ``Renew``
engine channel shim → engine              ``Submit``
engine channel engine → shim              ``Ready``, ``Alive``, ``Reply``, ``Left``, ``Stats``
=============  =========================  ===============================================
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from tandem.types import FinishReason, Load, SamplingParams

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]  # safe in a socket's path


class SequenceSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All an engine needs to build a sequence, or to rebuild it after a failure.

    ``sequence_id`` is new for each attempt at a request, so that a late message of an earlier
    attempt can never be mistaken. ``output_ids`` are the tokens the client already has.
    ``reply_to`` names the orchestrator whose stream-plane socket receives the tokens.
    """

    sequence_id: Name
    reply_to: Name
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...] = ()
    sampling: SamplingParams
    cache_salt: Annotated[str, Meta(max_length=256)] = ""


class TokenEvent(msgspec.Struct, frozen=True, array_like=True):
    """One new token. ``position`` counts output tokens from 0, so a gap or a repeat shows."""

    sequence_id: str
    position: int
    token_id: int
    logprob: float | None = None
    finish_reason: FinishReason | None = None


class PrefillReply(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a remote prefill; the KV handle travels beside it (empty if finished)."""

    worker: str
    token: TokenEvent
    num_cached_tokens: int
    queue_s: float
    prefill_s: float


class Admitted(msgspec.Struct, frozen=True, kw_only=True):
    """A decode engine took the sequence; after a pull, with what was moved and how fast."""

    worker: str
    incarnation: str
    num_cached_tokens: int = 0
    num_pulled_blocks: int = 0
    pulled_bytes: int = 0
    queue_s: float = 0.0
    pull_s: float = 0.0
    transport: str = ""  # that moved the blocks


class SequenceFailed(msgspec.Struct, frozen=True, kw_only=True):
    """A running sequence ended with an error (``errors.from_wire``)."""

    sequence_id: str
    error: str
    message: str


class Prefilled(msgspec.Struct, frozen=True, kw_only=True):
    """A locally prefilled sequence: how long it waited and how long its prefill took."""

    sequence_id: str
    num_cached_tokens: int
    queue_s: float
    prefill_s: float


class StepMessage(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """Everything one engine step has for one orchestrator; empty it is the heartbeat."""

    worker: str
    incarnation: str
    load: Load
    tokens: list[TokenEvent] = []
    prefilled: list[Prefilled] = []
    failed: list[SequenceFailed] = []


class EngineEnded(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """What a shim tells every orchestrator when its engine is gone: nobody waits for silence."""

    worker: str
    incarnation: str
    reason: str


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """The orchestrator's heartbeat; an engine drops the sequences of a silent orchestrator."""


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    sequence_ids: list[str]


class Renew(msgspec.Struct, frozen=True, tag="renew"):
    """Keeps the leases of these sequences for another ttl."""

    sequence_ids: list[str]


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """``spec`` is the encoded ``SequenceSpec`` as it came over the control plane."""

    call_id: int
    spec: bytes
    handle: bytes = b""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The engine has loaded its model and will take sequences."""

    incarnation: str
    fingerprint: str
    num_blocks: int
    max_model_len: int
    load_s: float


class Alive(msgspec.Struct, frozen=True, kw_only=True, tag="alive"):
    """The engine's sign of life to its shim, beside its step loop."""

    step_s: float  # for which the step under way has lasted


class Reply(msgspec.Struct, frozen=True, kw_only=True, tag="reply"):
    """The one answer to a ``Submit``: a result (and handle), or an error."""

    call_id: int
    result: bytes = b""
    handle: bytes = b""
    error: str = ""
    message: str = ""


class Left(msgspec.Struct, frozen=True, kw_only=True, tag="left"):
    """The sequence of this call no longer takes one of the engine's places."""

    call_id: int


class Stats(msgspec.Struct, frozen=True, kw_only=True, tag="stats"):
    """Gauges and running totals of an engine, for /metrics."""

    load: Load
    blocks: dict[str, int]  # free, cached, leased, used
    num_leases: int
    totals: dict[str, float]  # monotonic counters of this incarnation, by metric key


FromEngine = Ready | Alive | Reply | Left | Stats
ToOrchestrator = StepMessage | EngineEnded
FromOrchestrator = Ping | Cancel | Renew

_T = TypeVar("_T")
_encoder = msgspec.msgpack.Encoder()
_from_engine = msgspec.msgpack.Decoder(FromEngine)
_to_orchestrator = msgspec.msgpack.Decoder(ToOrchestrator)
_from_orchestrator = msgspec.msgpack.Decoder(FromOrchestrator)


def encode(message: msgspec.Struct) -> bytes:
    return _encoder.encode(message)


def decoder(kind: type[_T]) -> msgspec.msgpack.Decoder[_T]:
    """A strict decoder; raises ``msgspec.ValidationError`` / ``DecodeError`` on bad bytes."""
    return msgspec.msgpack.Decoder(kind)


def decode_from_engine(payload: bytes) -> FromEngine:
    return _from_engine.decode(payload)


def decode_to_orchestrator(payload: bytes) -> ToOrchestrator:
    return _to_orchestrator.decode(payload)


def decode_from_orchestrator(payload: bytes) -> FromOrchestrator:
    return _from_orchestrator.decode(payload)
