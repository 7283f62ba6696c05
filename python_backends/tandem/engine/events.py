"""What reaches the engine loop from its other threads, besides the wire messages."""

from __future__ import annotations

from dataclasses import dataclass

from tandem import wire
from tandem.engine.imports import PullDone, PullSettled
from tandem.kv.lease_board import Lease


@dataclass(frozen=True)
class LeaseEnded:
    lease: Lease
    was_released: bool


@dataclass(frozen=True)
class OrchestratorGone:
    name: str


@dataclass(frozen=True)
class Shutdown:
    pass


Event = (
    wire.Submit
    | wire.Cancel
    | wire.Renew
    | PullDone
    | PullSettled
    | LeaseEnded
    | OrchestratorGone
    | Shutdown
)
