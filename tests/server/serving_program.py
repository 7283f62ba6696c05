"""``tandem serve`` as a user starts it, all its processes, and streams that run in it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from running_server import wait_until
from tandem_cli.runtime_dir import SHM
from tandem_client import Completion, TandemClient, TandemClientError

PROGRAM = str(Path(sys.executable).with_name("tandem"))
SETTINGS = ("dtype=float32", "max_model_len=512", "kv_cache_mb=8")
FREE_PORTS = ("--http-port=0", "--grpc-port=0", "--metrics-port=0")
GONE_WITHIN_S = 20.0


@dataclass
class Serving:
    """A program that serves, and every process it ever had, all of whom must end with it."""

    process: subprocess.Popen[str]
    log: list[str] = field(default_factory=list)
    ready: dict[str, str] = field(default_factory=dict)
    family: list[psutil.Process] = field(default_factory=list)

    def meet(self) -> list[psutil.Process]:
        """Its descendants now; they are remembered."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        self.family += [process for process in found if process not in self.family]
        return found

    def find(self, *words: str) -> psutil.Process:
        """The descendant whose command line has all these words."""
        found = {p.pid: p for p in self.meet() if all(w in " ".join(p.cmdline()) for w in words)}
        assert len(found) == 1, (words, found)
        return next(iter(found.values()))

    @property
    def tritonserver(self) -> psutil.Process:
        return self.find("bin/tritonserver", "--model-repository")

    @property
    def runtime_dir(self) -> Path:
        return Path(self.tritonserver.environ()["TANDEM_RUNTIME_DIR"])

    @property
    def urls(self) -> list[str]:
        """Of both protocols."""
        return [f"grpc://{self.ready['grpc']}", self.ready["http"]]

    def client(self, **options: Any) -> TandemClient:
        return TandemClient(f"grpc://{self.ready['grpc']}", **options)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.meet()
        self.process.send_signal(number)
        return self.process.wait(60)

    def assert_nothing_is_left(self, runtime_dir: Path) -> None:
        wait_until(lambda: not any(map(is_alive, self.family)), GONE_WITHIN_S)
        assert not runtime_dir.exists()
        assert list(SHM.glob(f"{runtime_dir.name}-*")) == []


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def started(command: Sequence[str], env: dict[str, str] | None = None) -> Iterator[Serving]:
    """The program, whose processes are all killed if the test leaves it running."""
    serving = Serving(
        subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    )
    reader = threading.Thread(target=read_log, args=(serving,), daemon=True)
    reader.start()
    try:
        yield serving
    finally:
        if serving.process.poll() is None:
            serving.meet()
            serving.process.kill()
            for process in filter(is_alive, serving.family):
                process.kill()
        serving.process.wait()
        reader.join(10)
        print("\n".join(serving.log))


def read_log(serving: Serving) -> None:
    assert serving.process.stderr is not None
    for line in serving.process.stderr:
        serving.log.append(line.rstrip())


@contextmanager
def tandem_serve(
    model: Path, *options: str, settings: Sequence[str] = SETTINGS, before: Sequence[str] = ()
) -> Iterator[Serving]:
    """``before`` is what the command is an argument of."""
    command = [*before, PROGRAM, "serve", "--model", str(model), *FREE_PORTS, *options]
    command += [f"--set={setting}" for setting in settings]
    with started(command) as serving:
        assert serving.process.stdout is not None
        line = serving.process.stdout.readline()
        assert line.startswith("ready "), serving.log
        serving.ready = dict(re.findall(r"(\w+)=(\S+)", line))
        serving.meet()
        yield serving


def ask(serving: Serving, **params: Any) -> Completion:
    with serving.client() as client:
        return client.generate(**({"prompt": "hello the world", "max_tokens": 8} | params))


def up(serving: Serving) -> float:
    text = httpx.get(serving.ready["metrics"]).text
    return sum(map(float, re.findall(r"^tandem_engine_up{.*} (\S+)$", text, re.MULTILINE)))


class Streams:
    """Streams that run for long, each in a thread of its own, and how each of them ended."""

    def __init__(self, urls: Sequence[str], max_tokens: int) -> None:
        self.ends: list[Completion | TandemClientError] = []
        self._max_tokens = max_tokens
        self._num_running = threading.Semaphore(0)
        self._threads = [threading.Thread(target=self._read, args=(url,)) for url in urls]
        for thread in self._threads:
            thread.start()
        for _ in urls:
            assert self._num_running.acquire(timeout=30)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a stream hangs"

    def _read(self, url: str) -> None:
        params = {"max_tokens": self._max_tokens, "ignore_eos": True, "temperature": 0}
        with TandemClient(url, timeout=60) as client:
            try:
                with client.stream("hello the world", **params) as stream:
                    next(stream)
                    self._num_running.release()
                    self.ends.append(stream.result())
            except TandemClientError as error:
                self._num_running.release()
                self.ends.append(error)
