"""The micro-benchmarks by name, imported when chosen: torch only for the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import cast

from tandem_perf.micro.figure import Figure, MicroOptions

NAMES = ("handle", "scheduler", "orchestrator", "transport", "engine", "start")


def run_part(name: str, options: MicroOptions) -> Iterator[Figure]:
    """Measures as it is read."""
    assert name in NAMES
    module = import_module(f"tandem_perf.micro.{name}")
    run = cast(Callable[[MicroOptions], Iterator[Figure]], module.run)
    return run(options)
