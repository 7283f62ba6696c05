"""The processes in which Triton runs our models: which are there, and which have died."""

from __future__ import annotations

from pathlib import Path

_PROGRAM = "triton_python_backend_stub"


def stubs_of(server_pid: int) -> dict[int, str]:
    """Process id → model of every living stub of a tritonserver."""
    found = {}
    for task in Path(f"/proc/{server_pid}/task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:  # the thread ended meanwhile
            continue
        for pid in children:
            if model := _model(pid):
                found[int(pid)] = model
    return found


def _model(pid: str) -> str | None:
    """The model of a stub, whose first argument is <repository>/<model>/<version>/model.py."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return None
    if len(command) < 2 or not command[0].endswith(_PROGRAM):  # a zombie has no command
        return None
    return Path(command[1]).parts[-3]
