"""Several commands as one process, so that they have one pid, one log and one end.

``python -m tandem_perf.process_group JSON`` starts them all. When one ends, or SIGTERM comes, the
others get the stop signal, and SIGKILL after the grace. What they started themselves has the same
grace to end: only then are shared memory and the like cleaned up.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from types import FrameType

import msgspec

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_S = 0.1


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """``command``: split like a shell does, but run without one. ``env``: added to ours.
    ``directory``: to run in. ``cores``: e.g. "0-1" or "0,2"; empty: all that we may use.
    """

    command: str
    env: dict[str, str] = {}
    directory: str = "."
    cores: str = ""


class ProcessGroup(msgspec.Struct, frozen=True):
    """Raises ValueError for an unknown signal or bad cores."""

    commands: tuple[Command, ...]
    stop_signal: str = "SIGTERM"
    stop_grace_s: float = 30.0

    def __post_init__(self) -> None:
        if self.stop_signal not in signal.Signals.__members__:
            raise ValueError(f"stop_signal {self.stop_signal!r}: write it like SIGINT")
        for command in self.commands:
            core_set(command.cores)

    def command_line(self) -> list[str]:
        text = msgspec.json.encode(self).decode()
        return [sys.executable, "-m", "tandem_perf.process_group", text]


def core_set(text: str) -> frozenset[int]:
    """"0-2,4" → {0, 1, 2, 4}; raises ValueError."""
    cores: set[int] = set()
    try:
        for part in filter(None, text.split(",")):
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
    except ValueError:
        raise ValueError(f"cores {text!r}: write them like 0-1 or 0,2") from None
    return frozenset(cores)


def run(group: ProcessGroup) -> int:
    """The exit status of the process that ended first; 0 after SIGTERM."""
    has_to_stop = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal has_to_stop
        has_to_stop = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)  # processes without a parent become our children
    children: list[subprocess.Popen[bytes]] = []
    try:
        for command in group.commands:
            children.append(_start(command))
        while not has_to_stop and all(child.poll() is None for child in children):
            time.sleep(_POLL_S)
        ended = [child.returncode for child in children if child.returncode is not None]
        return abs(ended[0]) or 1 if ended and not has_to_stop else 0
    finally:
        _stop(children, group)


def _start(command: Command) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        shlex.split(command.command),
        env={**os.environ, **command.env},
        cwd=command.directory,
        stdin=subprocess.DEVNULL,
        preexec_fn=partial(_prepare_child, core_set(command.cores)),
    )


def _prepare_child(cores: frozenset[int]) -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if cores:
        os.sched_setaffinity(0, cores)


def _stop(children: Sequence[subprocess.Popen[bytes]], group: ProcessGroup) -> None:
    for child in children:
        if child.poll() is None:
            child.send_signal(signal.Signals[group.stop_signal])
    deadline = time.monotonic() + group.stop_grace_s
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    while _has_children() and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _has_children() -> bool:
    """Reaps those that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(run(msgspec.json.decode(sys.argv[1], type=ProcessGroup)))
