"""``comparison.json``: what a comparison found, and what went wrong."""

from __future__ import annotations

import msgspec

from tandem_perf.comparison import Row
from tandem_perf.provenance import Provenance

COMPARISON = "comparison.json"


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A run that did not happen, or whose figures must not be trusted."""

    deployment: str
    round: int
    message: str


class ComparisonResult(msgspec.Struct, frozen=True, kw_only=True):
    """``comparison.json``. ``facts`` by deployment. ``runs/<deployment>/round-<n>`` has the raw
    records of each run, ``rate-<r>`` those of a sweep.
    """

    deployments: tuple[str, ...]
    rounds: int
    facts: dict[str, dict[str, str]]
    faults: tuple[Fault, ...]
    interrupted: bool
    rows: tuple[Row, ...]
    provenance: Provenance
