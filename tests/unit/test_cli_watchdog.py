"""The watchdog; the stubs are children of the test that have a stub's command line."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem_cli import watchdog
from tandem_cli.errors import CliError
from tandem_cli.options import ServerOptions
from tandem_cli.roles import ServerRole
from tandem_cli.stubs import stubs_of
from tandem_cli.watchdog import ServerBroken, Watchdog


class FakeServer:
    """Its pid is ours, so that our children are its stubs."""

    http_url = "http://127.0.0.1:9"

    def __init__(self, directory: Path) -> None:
        self.pid = os.getpid()
        self.options = ServerOptions()
        self.reloaded: list[str] = []
        self.cannot_load = False
        self.tokens = 0.0
        self.stubs: dict[str, subprocess.Popen[bytes]] = {}
        self._directory = directory

    def start_stub(self, model: str) -> None:
        program = self._directory / model / "1" / "model.py"
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text("import time\ntime.sleep(60)\n")
        command = ["/backends/triton_python_backend_stub", str(program), f"{model}_0_0", "DEFAULT"]
        self.stubs[model] = subprocess.Popen(command, executable=sys.executable)
        while model not in stubs_of(self.pid).values():  # for a moment it has no command line
            pass

    def kill_stub(self, model: str) -> None:
        self.stubs[model].kill()
        os.waitid(os.P_PID, self.stubs[model].pid, os.WEXITED | os.WNOWAIT)  # stays a zombie

    def reload(self, model: str) -> None:
        if self.cannot_load:
            raise CliError("no memory")
        self.reloaded.append(model)
        self.start_stub(model)

    def num_output_tokens(self) -> float:
        return self.tokens


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeServer]:
    server = FakeServer(tmp_path)
    for model in ("llm", "decode"):
        server.start_stub(model)
    yield server
    for stub in server.stubs.values():
        stub.kill()
        stub.wait()


def watching(server: Any, log: list[str]) -> Watchdog:
    return Watchdog(server, log.append)


def test_stubs_are_found_by_their_command(server: FakeServer) -> None:
    found = stubs_of(server.pid)
    assert found == {stub.pid: model for model, stub in server.stubs.items()}
    server.kill_stub("llm")
    assert list(stubs_of(server.pid).values()) == ["decode"]


def test_a_dead_stub_is_revived(server: FakeServer) -> None:
    log: list[str] = []
    dog = watching(server, log)
    dog.check()
    assert (server.reloaded, log) == ([], [])
    server.kill_stub("decode")
    for _ in range(4):
        dog.check()
    assert server.reloaded == ["decode"]
    assert log[-1] == "the model decode serves again"


def test_what_cannot_be_revived_ends_the_server(server: FakeServer) -> None:
    dog = watching(server, [])
    server.cannot_load = True
    server.kill_stub("decode")
    dog.check()
    with pytest.raises(ServerBroken, match="decode cannot be loaded again: no memory"):
        dog.check()


def test_a_dead_orchestrator_ends_the_server(server: FakeServer) -> None:
    dog = watching(server, [])
    server.kill_stub("llm")
    dog.check()
    with pytest.raises(ServerBroken, match="the process of the model llm has died"):
        dog.check()


def test_probes_that_fail_end_the_server_unless_others_are_served(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "PROBE_EVERY_S", 0.0)  # nobody listens at its port
    log: list[str] = []
    dog = watching(server, log)

    def probes(count: int) -> None:
        while len(log) < count:
            dog.check()

    server.tokens = 1
    probes(1)
    server.tokens = 2
    probes(4)
    with pytest.raises(ServerBroken, match="health probes have failed"):
        probes(9)
    assert all(line.startswith("health probe: http://127.0.0.1:9: ") for line in log)


@pytest.mark.parametrize("role", [ServerRole.PREFILL, ServerRole.DECODE, ServerRole.ROUTER])
def test_a_server_that_needs_others_is_not_probed(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, role: ServerRole
) -> None:
    monkeypatch.setattr(watchdog, "PROBE_EVERY_S", 0.0)
    server.options = ServerOptions(role=role)
    log: list[str] = []
    dog = watching(server, log)
    dog.check()
    assert "probe" not in {thread.name for thread in threading.enumerate()} and log == []
