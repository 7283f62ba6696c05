"""tritonserver as a child that cannot outlive us, and the log it writes."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

ERROR = re.compile(r"E\d{4} |error: ")
HARMLESS = re.compile(r"Cuda|CUDA|NVML|DCGM")  # what Triton says on a machine without a GPU
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


class ServerProcess:
    """One process in a session of its own, with all it starts.

    Start it from a thread that lives as long as the server: the kernel ends the server when
    that thread ends. A thread of this object calls ``on_line`` for every line of the log.
    """

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], on_line: Callable[[str], None]
    ) -> None:
        self.tail: deque[str] = deque(maxlen=200)
        self.loaded_models: list[str] = []
        self._on_line = on_line
        self._process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            umask=0o077,  # its sockets and its files in /dev/shm are nobody else's
            preexec_fn=_end_with_parent,
        )
        self._reader = threading.Thread(target=self._read_log, name="server-log", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """The exit status, negative for a signal; None when it still runs after the timeout."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def terminate(self) -> None:
        """Asks for an orderly stop."""
        self._process.terminate()

    def kill(self) -> None:
        """Ends every process of the session at once."""
        for pid in session_members(self.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def close(self, timeout_s: float = 5.0) -> None:
        """Kills what is left of the session, reaps the server and ends the log thread."""
        deadline = time.monotonic() + timeout_s
        while session_members(self.pid) and time.monotonic() < deadline:
            self.kill()
            self.wait(0.05)
        self.wait(timeout_s)
        self._reader.join(timeout_s)

    def error_lines(self, count: int = 8) -> list[str]:
        """The last lines of the log that tell why: Tandem's own, else Triton's, else any."""
        lines = list(self.tail)
        own = [line for line in lines if " ERROR " in line]
        errors = [line for line in lines if ERROR.match(line) and not HARMLESS.search(line)]
        return (own or errors or lines)[-count:]

    def _read_log(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as log:
            for line in log:
                line = line.rstrip("\n")
                self.tail.append(line)
                if loaded := re.search(r"successfully loaded '([^']+)'", line):
                    self.loaded_models.append(loaded[1])
                self._on_line(line)


def session_members(session: int) -> list[int]:
    """Processes of a session that are not zombies."""
    members = []
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and os.getsid(int(entry)) == session and not _is_zombie(entry):
                members.append(int(entry))
        except OSError:  # it ended meanwhile
            continue
    return members


def _is_zombie(pid: str) -> bool:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "Z"


def _end_with_parent() -> None:
    """Runs in the child before exec: the kernel sends SIGTERM when the parent is killed."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
