"""Where a measurement was made."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import psutil

_PACKAGES = ("tandem-triton", "tritonclient", "grpcio", "httpx", "torch", "transformers", "uvloop")


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """``cores``: those this process may use. ``versions``: installed packages."""

    cpu: str
    cores: int
    memory_bytes: int
    system: str
    python: str
    load_average: tuple[float, float, float]
    versions: dict[str, str]


def this_machine() -> Machine:
    return Machine(
        cpu=_cpu_name(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        system=platform.platform(),
        python=platform.python_version(),
        load_average=os.getloadavg(),
        versions=_versions(),
    )


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
