"""What a reader needs to trust a result and to measure it again."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import msgspec

_REPOSITORY = Path(__file__).parents[2]
# Instructions that decide how fast matrices are multiplied on a CPU.
_FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_tile")


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """``commit``: of this project's repository; ends with "+" if files differ from it."""

    command: str
    commit: str
    cpu_flags: tuple[str, ...]
    cores_of_servers: str


def this_provenance(cores: frozenset[int] | None) -> Provenance:
    return Provenance(
        command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        commit=_commit(),
        cpu_flags=_cpu_flags(),
        cores_of_servers="all, shared with the load generator"
        if cores is None
        else ", ".join(map(str, sorted(cores))),
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
