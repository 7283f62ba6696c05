"""CPU time and memory of a server: its process and all that it started, by kind."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import psutil

_LIST_EVERY_S = 2.0  # walking /proc is not free


class ProcessUsage(msgspec.Struct, frozen=True):
    """``cpu_s``: user and system time since each process started."""

    cpu_s: float = 0.0
    rss_bytes: int = 0


class ProcessTree:
    """Remembers processes that have ended, so that CPU time never goes backwards."""

    def __init__(self, pid: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises psutil.NoSuchProcess."""
        self._root = psutil.Process(pid)
        self._clock = clock
        self._listed_s = float("-inf")
        self._kinds: dict[psutil.Process, str] = {}
        self._usages: dict[psutil.Process, ProcessUsage] = {}

    def usage(self) -> dict[str, ProcessUsage]:
        """By kind; memory that several processes share is counted in each."""
        if self._clock() - self._listed_s >= _LIST_EVERY_S:
            self._list()
        for process in self._kinds:
            before = self._usages.get(process, ProcessUsage())
            self._usages[process] = _usage(process) or ProcessUsage(before.cpu_s, 0)
        result: dict[str, ProcessUsage] = {}
        for process, usage in self._usages.items():
            kind = self._kinds[process]
            so_far = result.get(kind, ProcessUsage())
            result[kind] = ProcessUsage(
                so_far.cpu_s + usage.cpu_s, so_far.rss_bytes + usage.rss_bytes
            )
        return result

    def _list(self) -> None:
        self._listed_s = self._clock()
        try:
            processes = [self._root, *self._root.children(recursive=True)]
        except psutil.Error:
            return
        for process in processes:
            if process not in self._kinds:
                self._kinds[process] = process_kind(process)


def process_kind(process: psutil.Process) -> str:
    """``engine of stub decode``, ``stub llm``, ``tritonserver``, …"""
    try:
        command = process.cmdline()
        if "tandem.engine" in command:
            parent = process.parent()
            return f"engine of {process_kind(parent)}" if parent else "engine"
        if command and "stub" in command[0]:
            return f"stub {command[1].split('/')[-3]}"
        return str(process.name())
    except (psutil.Error, IndexError):
        return "other"


def _usage(process: psutil.Process) -> ProcessUsage | None:
    """None once it has ended."""
    try:
        with process.oneshot():
            times = process.cpu_times()
            return ProcessUsage(times.user + times.system, process.memory_info().rss)
    except psutil.Error:
        return None
