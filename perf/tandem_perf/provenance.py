"""What a reader needs to trust a result and to measure it again."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec

_REPOSITORY = Path(__file__).parents[2]
# Instructions that decide how fast matrices are multiplied on a CPU.
_FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_tile")
_QUIET_LOAD = 0.3


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """``commit``: of this project's repository; ends with "+" if files differ from it.
    ``load_before``: processes that wanted a core in the minute before (load average), per core.
    """

    command: str
    commit: str
    cpu_flags: tuple[str, ...]
    cores_of_servers: str
    load_before: float

    @property
    def busy_warning(self) -> str:
        """Empty if the machine was quiet enough."""
        if self.load_before < _QUIET_LOAD:
            return ""
        return (
            "This machine was busy with something else (load average "
            f"{self.load_before:.1f} a core before the first run): do not trust the figures."
        )


def this_provenance(cores: frozenset[int] | None) -> Provenance:
    return Provenance(
        command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        commit=_commit(),
        cpu_flags=_cpu_flags(),
        cores_of_servers="all, shared with the load generator"
        if cores is None
        else ", ".join(map(str, sorted(cores))),
        load_before=os.getloadavg()[0] / (os.cpu_count() or 1),
    )


def _commit() -> str:
    head = _git("rev-parse", "--short=12", "HEAD")
    return head + ("+" if head and _git("status", "--porcelain", "-uno") else "") or "unknown"


def _git(*arguments: str) -> str:
    try:
        result = subprocess.run(
            ["git", "-C", str(_REPOSITORY), *arguments], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip()


def _cpu_flags() -> tuple[str, ...]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ()
    found = next((line for line in lines if line.startswith("flags")), "").split()
    return tuple(flag for flag in _FLAGS if flag in found)
