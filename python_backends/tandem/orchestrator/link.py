"""The link: how the orchestrator reaches a pool on the control plane."""

from __future__ import annotations

from typing import Protocol

from tandem.wire import Admitted, PrefillReply, SequenceSpec


class Link(Protocol):
    """Every failure is a ``TandemError``; a cancelled call may still be running behind it."""

    async def prefill(self, spec: SequenceSpec) -> tuple[PrefillReply, bytes]:
        """The first token and a KV handle, which is empty if that token was the last."""
        ...

    async def decode(self, spec: SequenceSpec, handle: bytes) -> Admitted:
        """Returns when the sequence runs; its tokens come over the stream plane. Without a handle
        the worker prefills it itself."""
        ...
