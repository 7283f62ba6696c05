"""``TandemServer``: a real tritonserver with Tandem's models, started, watched and stopped."""

from __future__ import annotations

import http.client
import os
import random
import re
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tandem.drain import is_drained, request_drain, requested_grace_s
from tandem_cli.errors import CliError
from tandem_cli.http_request import request
from tandem_cli.options import ServerOptions
from tandem_cli.ports import Ports, choose_ports
from tandem_cli.preflight import REGION_BYTES, check_model, check_shared_memory
from tandem_cli.repository import CPU_PROFILE, RenderedRepository, render
from tandem_cli.roles import check_environment
from tandem_cli.runtime_dir import RuntimeDir, remove_stale
from tandem_cli.server_process import ServerProcess
from tandem_cli.triton import TritonInstallation, fetch_triton, triton_installation

# What clients of a public endpoint must not do: load models, map memory, write traces, set logs.
ADMIN_APIS = "model-repository,shared-memory,trace,logging"
ADMIN_HEADER = "tandem-admin-key"
# On a busy machine a Python stub sometimes crashes before it runs any of our code, and the server
# ends with this exception: a fault of Triton (triton-inference-server/server issue 8882).
STUB_START_CRASH = "boost::interprocess::lock_exception"
STOP_GRACE_S = 40.0  # tritonserver itself gives up after 30
RELOAD_TIMEOUT_S = 900.0
DRAIN_MARGIN_S = 3.0
_OUTPUT_TOKENS = re.compile(r"^tandem_output_tokens_total(?:{.*})? (\S+)$", re.MULTILINE)


def log_to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class TandemServer:
    """Takes the fields of ``ServerOptions`` as keywords. As a context manager it is ready.

    ::

        with TandemServer(http_port=0, grpc_port=0, metrics_port=0, policy="never") as server:
            httpx.get(f"{server.http_url}/v2/health/ready")

    When the block ends no process, no file in /dev/shm and no runtime folder is left.
    """

    ports: Ports  # all these from start() on
    repository: RenderedRepository
    model: Path
    runtime_dir: RuntimeDir

    def __init__(self, *, log: Callable[[str], None] = log_to_stderr, **options: Any) -> None:
        self.options = ServerOptions(**options)
        self.admin_headers = {ADMIN_HEADER: secrets.token_hex(16)}
        self._log = log
        self._process: ServerProcess | None = None

    @property
    def http_url(self) -> str:
        return f"http://{self._client_host}:{self.ports.http}"

    @property
    def grpc_address(self) -> str:
        return f"{self._client_host}:{self.ports.grpc}"

    @property
    def metrics_url(self) -> str:
        return f"http://{self._client_host}:{self.ports.metrics}/metrics"

    @property
    def pid(self) -> int:
        return self._running().pid

    @property
    def loaded_models(self) -> list[str]:
        """Models that the log reported as loaded."""
        return self._running().loaded_models

    def start(self) -> None:
        """Checks everything, then starts the process; call ``stop`` whatever happens next."""
        plan = self.options.plan()
        check_environment(plan.role, plan.policy, os.environ)
        self.model = _resolve_model(self.options.model)
        check_model(self.model)
        fetch_triton()
        triton = triton_installation()
        self.ports = choose_ports(self.options.host, self._wanted_ports, random.SystemRandom())
        remove_stale()
        self.runtime_dir = RuntimeDir()
        try:
            source = self.options.model_repository
            self.repository = render(source, self.runtime_dir.path / "models", plan)
            check_shared_memory(self.repository.num_instances)
            command = [str(triton.server), *self._arguments(triton)]
            self._process = ServerProcess(command, self._environment(triton), self._log)
        except BaseException:
            self.runtime_dir.remove()
            raise

    def wait_ready(
        self, timeout_s: float = 900.0, on_wait: Callable[[float], None] | None = None
    ) -> None:
        """Returns once all models serve; ``on_wait`` hears the seconds that have passed.

        Starts the server once more where it ended by ``STUB_START_CRASH``.
        """
        started, may_restart = time.monotonic(), True
        while not _is_ready(self._client_host, self.ports.http):
            elapsed = time.monotonic() - started
            process = self._running()
            if process.wait(0.2) is not None:
                process.close()
                lines = process.error_lines()
                if may_restart and any(STUB_START_CRASH in line for line in lines):
                    may_restart = False
                    self._log("a stub of Triton crashed at its start; starting the server again")
                    self.stop()
                    self.start()
                    continue
                shown = "\n  ".join(lines)
                raise CliError(
                    f"tritonserver ended with status {process.poll()} before it was "
                    f"ready:\n  {shown}"
                )
            if elapsed > timeout_s:
                raise CliError(f"tritonserver was not ready after {timeout_s:.0f} s")
            if on_wait:
                on_wait(elapsed)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """The exit status once the server ended by itself; None when it still runs."""
        return self._running().wait(timeout_s)

    def kill(self) -> None:
        """Ends the server and all its children at once; ``stop`` must still clean up."""
        if self._process:
            self._process.kill()

    def reload(self, model: str) -> None:
        """Unloads and loads a model, which starts its processes anew; raises ``CliError``."""
        for action in ("unload", "load"):
            path = f"/v2/repository/models/{model}/{action}"
            status, answer = request(
                self.http_url, "POST", path, {}, RELOAD_TIMEOUT_S, self.admin_headers
            )
            if status != 200:
                raise CliError(f"{action} {model}: {answer.get('error', f'HTTP {status}')}")

    def num_output_tokens(self) -> float:
        """Tokens generated so far, from /metrics; 0 where they cannot be read."""
        connection = http.client.HTTPConnection(self._client_host, self.ports.metrics, timeout=5)
        try:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
            return sum(map(float, _OUTPUT_TOKENS.findall(text)))
        except (OSError, http.client.HTTPException):
            return 0.0
        finally:
            connection.close()

    @property
    def is_drain_requested(self) -> bool:
        """By ``tandem drain``: then the server has to stop."""
        return requested_grace_s(self.runtime_dir.path) is not None

    def drain(self, grace_s: float) -> None:
        """Refuses new requests and returns when none runs any more; what is still running after
        the grace has got an error then. Triton cannot do that: on SIGTERM it unloads the engines
        under the requests that run.
        """
        process, directory = self._running(), self.runtime_dir.path
        request_drain(directory, grace_s)
        deadline = time.monotonic() + (requested_grace_s(directory) or 0.0) + DRAIN_MARGIN_S
        while time.monotonic() < deadline and not is_drained(directory):
            if process.wait(0.05) is not None:
                return

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Orderly stop, after the grace a hard one; removes all traces. May be called again."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self.drain(self.options.drain_timeout_s)
            self._process.terminate()
            self._process.wait(grace_s)
        self._process.close()
        self.runtime_dir.remove()
        self._process = None

    def ready_line(self) -> str:
        """What ``tandem serve`` prints for programs that wait for it."""
        count = self.repository.instances
        return (
            f"ready http={self.http_url} grpc={self.grpc_address} metrics={self.metrics_url} "
            f"model={self.model.name} policy={self.options.policy} "
            f"prefill={count.get('prefill', 0)} decode={count.get('decode', 0)}"
        )

    def __enter__(self) -> Self:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _running(self) -> ServerProcess:
        assert self._process is not None, "the server was not started"
        return self._process

    @property
    def _client_host(self) -> str:
        any_address = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}
        host = self.options.host
        return any_address.get(host, f"[{host}]" if ":" in host else host)

    @property
    def _wanted_ports(self) -> Ports:
        options = self.options
        return Ports(http=options.http_port, grpc=options.grpc_port, metrics=options.metrics_port)

    def _arguments(self, triton: TritonInstallation) -> list[str]:
        options, ports = self.options, self.ports
        admin = f"{ADMIN_APIS}:{ADMIN_HEADER}={self.admin_headers[ADMIN_HEADER]}"
        info = options.log_level in ("debug", "info")
        arguments = [
            f"--model-repository={self.repository.path}",
            f"--backend-directory={triton.backend_directory}",
            f"--http-address={options.host}",
            f"--http-port={ports.http}",
            f"--grpc-address={options.host}",
            f"--grpc-port={ports.grpc}",
            f"--metrics-address={options.host}",
            f"--metrics-port={ports.metrics}",
            "--disable-auto-complete-config",
            "--exit-timeout-secs=30",
            "--model-control-mode=explicit",  # so that the watchdog can load a model again
            "--load-model=*",
            f"--log-info={str(info).lower()}",
            f"--log-warning={str(options.log_level != 'error').lower()}",
            f"--http-restricted-api={admin}",
            f"--grpc-restricted-protocol={admin}",
            f"--backend-config=python,shm-region-prefix-name={self.runtime_dir.shm_prefix}",
            f"--backend-config=python,shm-default-byte-size={REGION_BYTES}",
        ]
        if options.profile == CPU_PROFILE:
            return [*arguments, "--allow-gpu-metrics=false"]
        return [*arguments, f"--model-config-name={options.profile}"]

    def _environment(self, triton: TritonInstallation) -> dict[str, str]:
        return triton.env() | {
            "TANDEM_MODEL": str(self.model),
            "TANDEM_RUNTIME_DIR": str(self.runtime_dir.path),
            "TANDEM_LOG_LEVEL": self.options.log_level.upper(),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "TQDM_DISABLE": "1",  # no progress bars in the log
        }


def _resolve_model(model: str) -> Path:
    if model == "smollm2":
        from tandem_cli.smollm2 import fetch_smollm2

        return fetch_smollm2()
    return Path(model).expanduser().resolve()


def _is_ready(host: str, port: int) -> bool:
    connection = http.client.HTTPConnection(host, port, timeout=2)
    try:
        connection.request("GET", "/v2/health/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
