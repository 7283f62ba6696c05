"""What an engine accepts: every check of a submitted sequence, before anything is allocated."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass

import msgspec

from tandem import wire
from tandem.engine.imports import Imports
from tandem.errors import InvalidRequest, RequestCancelled
from tandem.kv.handle import KVHandle
from tandem.stream_address import parse_tcp_name
from tandem.types import Role

_MAX_TOMBSTONES = 4096
_decode_spec = wire.decoder(wire.SequenceSpec).decode


@dataclass(frozen=True)
class EngineLimits:
    role: Role
    block_size: int
    vocab_size: int
    max_model_len: int
    may_reply_over_tcp: bool = False


class Admission:
    """Owned by the engine loop. Anybody can call the prefill and decode models, so nothing in a
    submission is believed.
    """

    def __init__(self, limits: EngineLimits, imports: Imports) -> None:
        self._limits = limits
        self._imports = imports
        self._tombstones: OrderedDict[str, None] = OrderedDict()

    def bar(self, sequence_id: str) -> None:
        """Cancelled before it came: it will be refused when it does."""
        self._tombstones[sequence_id] = None
        if len(self._tombstones) > _MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)

    def admit(
        self, message: wire.Submit, running: Container[str]
    ) -> tuple[wire.SequenceSpec, KVHandle | None]:
        """The sequence and its verified handle; raises ``InvalidRequest`` or
        ``RequestCancelled``."""
        try:
            spec = _decode_spec(message.spec)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequest("request", f"not a sequence of this version: {error}") from error
        self._check_tokens(spec)
        self._check_reply_to(spec.reply_to)
        if spec.sequence_id in running:
            raise InvalidRequest("sequence_id", f"{spec.sequence_id} is running here already")
        if spec.sequence_id in self._tombstones:
            del self._tombstones[spec.sequence_id]
            raise RequestCancelled("cancelled before it was admitted")
        handle = self._imports.verify(message.handle, spec) if message.handle else None
        if handle is not None and self._limits.role is Role.PREFILL:
            raise InvalidRequest("handle", "a prefill worker takes no handle")
        return spec, handle

    def _check_reply_to(self, name: str) -> None:
        try:
            address = parse_tcp_name(name)
        except ValueError as error:
            raise InvalidRequest("reply_to", f"{name}: {error}") from error
        if address is not None and not self._limits.may_reply_over_tcp:
            raise InvalidRequest("reply_to", "orchestrators of other hosts need a TANDEM_SECRET")

    def _check_tokens(self, spec: wire.SequenceSpec) -> None:
        vocab_size, max_model_len = self._limits.vocab_size, self._limits.max_model_len
        known = (*spec.prompt_ids, *spec.output_ids)
        if not spec.prompt_ids:
            raise InvalidRequest("prompt_ids", "empty")
        if not all(0 <= token < vocab_size for token in known):
            raise InvalidRequest("prompt_ids", f"ids must be in [0, {vocab_size})")
        if len(known) >= max_model_len:
            raise InvalidRequest(
                "prompt_ids", f"{len(known)} tokens leave no room in max_model_len {max_model_len}"
            )
