"""A server that is not ours: start commands, health URLs, addresses, from a TOML file."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import msgspec

from tandem_cli.errors import CliError
from tandem_cli.server_process import ServerProcess
from tandem_perf.deployments import Endpoint, TandemDeployment
from tandem_perf.process_group import Command, ProcessGroup

_POLL_S = 0.25


class HealthyCommand(Command, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``health_url``: answers 200 once the process serves; empty: not waited for."""

    health_url: str = ""


class ExternalDeployment(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="external",
    tag_field="kind",
):  # fmt: skip
    """``urls``: requests take turns between them. ``after_start``: a shell command that runs once
    all processes are healthy, with ``$SERVER_PID`` their common parent. ``stop_signal`` goes to
    each process; what is left after ``stop_grace_s`` is killed. ``$TMPDIR`` is a fresh folder
    for each start: servers forget sockets and files there.
    """

    name: str
    urls: tuple[str, ...]
    processes: tuple[HealthyCommand, ...]
    target: str = "openai"
    model: str | None = None
    metrics_url: str | None = None
    start_timeout_s: float = 600.0
    after_start: str = ""
    stop_signal: str = "SIGTERM"
    stop_grace_s: float = 30.0
    note: str = ""

    @contextlib.contextmanager
    def running(self, log: Path) -> Iterator[Endpoint]:
        group = ProcessGroup(self.processes, self.stop_signal, self.stop_grace_s)
        with log.open("w") as file, _temporary_folder() as folder:
            process = ServerProcess(
                group.command_line(), {**os.environ, "TMPDIR": folder},
                lambda line: print(line, file=file, flush=True),
            )  # fmt: skip
            try:
                self._wait_healthy(process)
                self._run_after_start(process.pid)
                yield self._endpoint(process.pid)
            finally:
                process.terminate()
                process.wait(self.stop_grace_s + 5)
                process.close()

    def _endpoint(self, pid: int) -> Endpoint:
        facts = {f"process {n}": c.command for n, c in enumerate(self.processes, 1)}
        if self.note:
            facts["note"] = self.note
        return Endpoint(
            target=self.target if len(self.urls) == 1 else f"{self.target}-round-robin",
            url=",".join(self.urls),
            model=self.model,
            metrics_url=self.metrics_url,
            pid=pid,
            facts=facts,
        )

    def _wait_healthy(self, process: ServerProcess) -> None:
        waiting = [command.health_url for command in self.processes if command.health_url]
        deadline = time.monotonic() + self.start_timeout_s
        with httpx.Client(timeout=2.0) as client:
            while waiting := [url for url in waiting if not _is_healthy(client, url)]:
                if process.wait(_POLL_S) is not None:
                    process.close()
                    tail = "\n  ".join(list(process.tail)[-12:])
                    raise CliError(f"{self.name}: ended before it was healthy:\n  {tail}")
                if time.monotonic() > deadline:
                    raise CliError(
                        f"{self.name}: {', '.join(waiting)} not healthy after "
                        f"{self.start_timeout_s:g} s"
                    )

    def _run_after_start(self, pid: int) -> None:
        if not self.after_start:
            return
        result = subprocess.run(
            ["sh", "-c", self.after_start], env={**os.environ, "SERVER_PID": str(pid)},
            capture_output=True, text=True, timeout=self.start_timeout_s,
        )  # fmt: skip
        if result.returncode:
            raise CliError(f"{self.name}: after_start failed: {result.stderr.strip()}")


def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    deployment: tuple[TandemDeployment | ExternalDeployment, ...]


def read_deployments(
    path: Path, environ: Mapping[str, str] = os.environ
) -> tuple[TandemDeployment | ExternalDeployment, ...]:
    """``[[deployment]]`` tables of a TOML file; ``${NAME}`` in a text is the environment's.

    Raises CliError that names the file and the field. ``${PYTHON}`` is the running Python.
    """
    known = {"PYTHON": sys.executable, **environ}
    try:
        text = path.read_text()
    except OSError as error:
        raise CliError(f"{path}: {error.strerror}") from error
    try:
        found = msgspec.toml.decode(text)
        deployments = msgspec.convert(_expand(found, known, path), _File).deployment
    except msgspec.MsgspecError as error:
        raise CliError(f"{path}: {error}") from error
    for deployment in deployments:
        if isinstance(deployment, ExternalDeployment):
            _check(deployment, path)
    return deployments


def _check(deployment: ExternalDeployment, path: Path) -> None:
    if not deployment.urls or not deployment.processes:
        raise CliError(f"{path}: {deployment.name}: needs urls and processes")
    if not any(command.health_url for command in deployment.processes):
        raise CliError(f"{path}: {deployment.name}: no process has a health_url")
    try:
        ProcessGroup(deployment.processes, deployment.stop_signal, deployment.stop_grace_s)
    except ValueError as error:
        raise CliError(f"{path}: {deployment.name}: {error}") from error


def _expand(value: object, environ: Mapping[str, str], path: Path) -> object:
    def replaced(match: re.Match[str]) -> str:
        name, default = match[1], match[2]
        if name not in environ and default is None:
            raise CliError(f"{path}: set {name} in the environment")
        return environ.get(name, default or "")

    match value:
        case str():
            return re.sub(r"\$\{(\w+)(?::-([^}]*))?\}", replaced, value)
        case list():
            return [_expand(item, environ, path) for item in value]
        case dict():
            return {key: _expand(item, environ, path) for key, item in value.items()}
    return value


def _is_healthy(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(url).status_code == 200
    except httpx.HTTPError:
        return False
