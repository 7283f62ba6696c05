"""Workloads by the name a user gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tandem_perf.workloads.agentic import Agentic
from tandem_perf.workloads.base import Workload, WorkloadError, WorkloadOptions
from tandem_perf.workloads.chat import Chat
from tandem_perf.workloads.mixed import SHORT_TOKENS, Mixed
from tandem_perf.workloads.mooncake import Mooncake
from tandem_perf.workloads.shared_prefix import SharedPrefix
from tandem_perf.workloads.user_file import UserFile

_SYNTHETIC: dict[str, Callable[[WorkloadOptions], Workload]] = {
    "mixed-60-40": lambda options: Mixed("mixed-60-40", 1024, options),
    "mixed-60-40-3k": lambda options: Mixed("mixed-60-40-3k", 3000, options),
    "mixed-60-40-8k": lambda options: Mixed("mixed-60-40-8k", 8000, options),
    "chat": Chat,
    "shared-prefix": SharedPrefix,
    "agentic": Agentic,
}
_FILES: dict[str, Callable[[Path, WorkloadOptions], Workload]] = {
    "mooncake": Mooncake,
    "jsonl": UserFile,
}
NAMES = (*_SYNTHETIC, *(f"{kind}:FILE" for kind in _FILES))


def load_workload(spec: str, options: WorkloadOptions) -> Workload:
    """``spec`` is one of NAMES; raises WorkloadError."""
    if spec in _SYNTHETIC:
        return _SYNTHETIC[spec](options)
    kind, _, path = spec.partition(":")
    if kind not in _FILES or not path:
        raise WorkloadError(f"workload {spec!r}: one of {', '.join(NAMES)}")
    if not Path(path).is_file():
        raise WorkloadError(f"workload {spec!r}: no such file")
    return _FILES[kind](Path(path), options)


def is_file(spec: str) -> bool:
    """Whether the workload is a file, so that it has an end."""
    return ":" in spec


def warm_up_workload(workload: Workload, options: WorkloadOptions) -> Workload:
    """Like the workload, with another seed; a user's requests would warm the caches for
    themselves, so a user's file is warmed up with short random prompts.
    """
    return Mixed("warm-up", SHORT_TOKENS, options) if isinstance(workload, UserFile) else workload
