"""The link: how the orchestrator reaches a pool on the control plane."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from tandem import wire
from tandem.errors import InvalidRequest, Unavailable
from tandem.types import Role
from tandem.wire import Admitted, PrefillReply, SequenceSpec

_decode_prefill = wire.decoder(PrefillReply).decode
_decode_admitted = wire.decoder(Admitted).decode


class Link(Protocol):
    """Every failure is a ``TandemError``; a cancelled call may still be running behind it.
    ``worker`` is the one that should take the call; another one may.
    """

    async def prefill(self, spec: SequenceSpec, worker: str | None) -> tuple[PrefillReply, bytes]:
        """The first token and a KV handle, which is empty if that token was the last."""
        ...

    async def decode(self, spec: SequenceSpec, handle: bytes, worker: str | None) -> Admitted:
        """Returns when the sequence runs; its tokens come over the stream plane. Without a handle
        the worker prefills it itself."""
        ...


class TritonLink(ABC):
    """A ``Link`` to Triton models, which are named after their roles."""

    async def prefill(self, spec: SequenceSpec, worker: str | None) -> tuple[PrefillReply, bytes]:
        result, handle = await self.call(Role.PREFILL, wire.encode(spec), b"", worker)
        return _decode_prefill(result), handle

    async def decode(self, spec: SequenceSpec, handle: bytes, worker: str | None) -> Admitted:
        try:
            result, _ = await self.call(Role.DECODE, wire.encode(spec), handle, worker)
        except InvalidRequest as error:
            if error.field != "handle":
                raise
            # Ours, so it was good once: the prefill is repeated, the user has done nothing wrong.
            raise Unavailable(f"the KV handle was refused: {error}") from error
        return _decode_admitted(result)

    @abstractmethod
    async def call(
        self, role: Role, request: bytes, handle: bytes, worker: str | None
    ) -> tuple[bytes, bytes]:
        """The outputs ``result`` and ``handle``; raises what the model answered instead."""

    @abstractmethod
    async def start(self) -> None:
        """On the loop that makes the calls."""

    @abstractmethod
    async def stop(self) -> None:
        """No call is under way any more."""
