"""Where an engine's answers go: to its shim (one per call) and to the orchestrators (streams)."""

from __future__ import annotations

from typing import Protocol

from tandem import wire


class Outbox(Protocol):
    def to_shim(self, message: wire.Reply | wire.Left | wire.Stats | wire.Ready) -> None: ...
    def to_orchestrator(self, name: str, message: wire.StepMessage) -> None: ...

    def meet(self, name: str) -> None:
        """Opens the stream plane to this orchestrator, so that it can cancel from now on."""
        ...
