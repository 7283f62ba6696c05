from __future__ import annotations

import os
import threading

from tandem_cli.serve import exit_code
from tandem_cli.server_process import ServerProcess, session_members


class Log:
    """Collects lines and tells when one has come."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.first = threading.Event()

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        self.first.set()


def _start(script: str) -> tuple[ServerProcess, Log]:
    log = Log()
    return ServerProcess(["/bin/sh", "-c", script], dict(os.environ), log), log


def test_log_is_read_from_both_streams() -> None:
    process, log = _start("echo out; echo err >&2; exit 3")
    assert process.wait(10) == 3
    process.close()
    assert sorted(log.lines) == ["err", "out"]


def test_loaded_models_are_read_from_the_log() -> None:
    process, _ = _start("""echo "I1 model_lifecycle.cc:1] \\"successfully loaded 'llm'\\"" """)
    process.wait(10)
    process.close()
    assert process.loaded_models == ["llm"]


def test_children_that_outlive_the_server_are_killed() -> None:
    process, log = _start("trap '' TERM; sleep 60 & (trap '' TERM; sleep 60) & echo up; exit 0")
    assert log.first.wait(10)
    assert process.wait(10) == 0
    assert session_members(process.pid)
    process.close()
    assert session_members(process.pid) == []


def test_terminate_asks_and_kill_does_not() -> None:
    process, log = _start("trap 'exit 7' TERM; echo up; while :; do sleep 0.02; done")
    assert log.first.wait(10)
    assert process.wait(0.01) is None
    process.terminate()
    assert process.wait(10) == 7
    process.close()

    process, log = _start("trap '' TERM; echo up; while :; do sleep 0.02; done")
    assert log.first.wait(10)
    process.kill()
    assert process.wait(10) == -9
    process.close()


def test_reason_of_a_failed_start_prefers_our_own_lines() -> None:
    triton = "echo 'I1130 x loading'; echo 'E1130 x CUDA missing'; echo 'E1130 x failed to load'"
    process, _ = _start(triton)
    process.wait(10)
    process.close()
    assert process.error_lines() == ["E1130 x failed to load"]

    process, _ = _start(f"echo '12:00 decode_0_0 ERROR tandem: bad dtype'; {triton}")
    process.wait(10)
    process.close()
    assert process.error_lines() == ["12:00 decode_0_0 ERROR tandem: bad dtype"]

    process, _ = _start("echo one; echo two")
    process.wait(10)
    process.close()
    assert process.error_lines(1) == ["two"]


def test_server_that_ends_by_itself_is_never_a_success() -> None:
    assert exit_code(0) == 1
    assert exit_code(3) == 3
    assert exit_code(-9) == 137
