"""``tandem serve`` starts, stops and is killed: no process and no file of it is ever left."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from running_server import wait_until
from tandem_cli.ports import Ports, choose_ports
from tandem_cli.repository import DEFAULT_REPOSITORY
from tandem_cli.runtime_dir import SHM
from tandem_cli.triton import triton_installation
from tandem_client import Completion, TandemClient, TandemClientError

PROGRAM = str(Path(sys.executable).with_name("tandem"))
SETTINGS = ("dtype=float32", "max_model_len=512", "kv_cache_mb=8")
FREE_PORTS = ("--http-port=0", "--grpc-port=0", "--metrics-port=0")
READY_WITHIN_S = 180.0
GONE_WITHIN_S = 10.0
SMALL_SHM = "mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "


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


def assert_idles(serving: Serving) -> None:
    """All processes of the server together use less than 5 % of a core."""
    seconds = 5.0

    def cpu_seconds() -> dict[psutil.Process, float]:
        return {p: sum(p.cpu_times()[:2]) for p in serving.meet()}

    time.sleep(1)  # the start is over
    before = cpu_seconds()
    time.sleep(seconds)
    used = {p: (now - before[p]) / seconds for p, now in cpu_seconds().items()}
    shares = [f"{share:.1%} {' '.join(p.cmdline()[-2:])[-40:]}" for p, share in used.items()]
    print("idle:", shares)
    assert sum(used.values()) < 0.05, shares


def can_mount() -> bool:
    command = ["unshare", "-m", "sh", "-c", SMALL_SHM + "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


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


def test_sigterm_with_live_streams_after_an_engine_was_killed(
    tiny_model_dir: Callable[..., Path],
) -> None:
    with tandem_serve(tiny_model_dir("llama")) as serving:
        assert {"http", "grpc", "metrics", "model", "policy"} <= serving.ready.keys()
        assert httpx.get(f"{serving.ready['http']}/v2/health/ready").status_code == 200
        assert "tandem_engine_up" in httpx.get(serving.ready["metrics"]).text
        whole = ask(serving, max_tokens=400, ignore_eos=True, temperature=0)
        runtime_dir = serving.runtime_dir
        [engine] = serving.find("python_backend_stub", "decode_0_0").children()
        engine.kill()
        wait_until(lambda: up(serving) == 1)
        wait_until(lambda: up(serving) == 2, 60)
        urls = [f"grpc://{serving.ready['grpc']}", serving.ready["http"]]
        streams = Streams(urls * 4, max_tokens=400)
        assert serving.stop() == 0
        streams.join()
        assert len(streams.ends) == 8
        for end in streams.ends:
            assert isinstance(end, TandemClientError) or end.text == whole.text
        print("streams ended as", [type(end).__name__ for end in streams.ends])
        serving.assert_nothing_is_left(runtime_dir)


def test_a_killed_serve_takes_everything_along(tiny_model_dir: Callable[..., Path]) -> None:
    with tandem_serve(tiny_model_dir("llama")) as serving:
        runtime_dir = serving.runtime_dir
        assert serving.stop(signal.SIGKILL) == -signal.SIGKILL
        wait_until(lambda: not any(map(is_alive, serving.family)), GONE_WITHIN_S)
    # Files are left, as nobody lived to delete them: the next start does.
    with tandem_serve(tiny_model_dir("llama")) as serving:
        assert not runtime_dir.exists()
        assert list(SHM.glob(f"{runtime_dir.name}-*")) == []
        assert_idles(serving)
        runtime_dir = serving.runtime_dir
        serving.tritonserver.kill()
        assert serving.process.wait(30) == 128 + signal.SIGKILL
        serving.assert_nothing_is_left(runtime_dir)


def test_a_colocated_pair_in_64_mb_of_shared_memory_ends_with_sigint(
    tiny_model_dir: Callable[..., Path],
) -> None:
    if not can_mount():
        pytest.skip("no permission to mount a tmpfs of 64 MB on /dev/shm")
    in_small_shm = ("unshare", "-m", "sh", "-c", SMALL_SHM + '"$@"', "sh")
    options = ("--policy=never", "--decode-instances=2")
    with tandem_serve(tiny_model_dir("llama"), *options, before=in_small_shm) as serving:
        assert (serving.ready["policy"], serving.ready["prefill"]) == ("never", "0")
        answers = [ask(serving) for _ in range(8)]
        assert len({answer.text for answer in answers}) == 1
        workers = {answer.timings.decode_worker for answer in answers}
        assert workers == {"decode_0_0", "decode_0_1"}
        assert {answer.timings.path for answer in answers} == {"local"}
        runtime_dir = serving.runtime_dir
        assert serving.stop(signal.SIGINT) == 0
        serving.assert_nothing_is_left(runtime_dir)


def test_tritonserver_alone_with_the_repository_as_it_is(
    tiny_model_dir: Callable[..., Path],
) -> None:
    """Nothing but TANDEM_MODEL is set; sizes are those of config.pbtxt."""
    model = tiny_model_dir("llama", max_position_embeddings=2048)
    triton = triton_installation()
    ports = choose_ports("127.0.0.1", Ports(http=0, grpc=0, metrics=0), random.Random(os.getpid()))
    command = [
        str(triton.server),
        f"--model-repository={DEFAULT_REPOSITORY}",
        f"--backend-directory={triton.backend_directory}",
        f"--http-port={ports.http}",
        f"--grpc-port={ports.grpc}",
        f"--metrics-port={ports.metrics}",
    ]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("TANDEM_")}
    with started(command, triton.env(inherited) | {"TANDEM_MODEL": str(model)}) as serving:
        serving.ready = {"grpc": f"127.0.0.1:{ports.grpc}"}
        with serving.client() as client:
            wait_until(client.is_ready, READY_WITHIN_S)
        runtime_dir = Path(f"/tmp/tandem-{os.getuid()}-{serving.process.pid}")
        assert runtime_dir.is_dir()
        first, long = ask(serving), ask(serving, prompt="the hello world " * 60)
        assert first.timings.path == "remote", "policy auto, when it knows no worker yet"
        assert long.num_output_tokens == 8
        maps = {Path(area.path) for area in psutil.Process(serving.process.pid).memory_maps()}
        regions = {path for path in maps if path.is_relative_to(SHM)}
        assert regions
        assert serving.stop() == 0
        serving.assert_nothing_is_left(runtime_dir)
        assert not any(path.exists() for path in regions)


# ---- starts that fail ------------------------------------------------------------------------


def refused(*options: str) -> str:
    """The error of a start that ends with status 1."""
    command = [PROGRAM, "serve", *FREE_PORTS, *options]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 1, run.stderr
    assert run.stdout == ""
    [line] = run.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def test_bad_options_are_told_in_one_line(
    tiny_model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    model = f"--model={tiny_model_dir('llama')}"
    assert "unknown key 'no_such_key'" in refused(model, "--set=no_such_key=1")
    assert "no model 'embed'" in refused(model, "--set=embed.dtype=float32")
    assert "max_num_seqs" in refused(model, "--set=decode.max_num_seqs=0")
    assert "no such directory" in refused(f"--model={tmp_path / 'missing'}")
    assert "no config.json" in refused(f"--model={tmp_path}")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert f"--http-port {port}: cannot listen" in refused(model, f"--http-port={port}")


def test_a_model_that_cannot_be_served_says_why(tiny_model_dir: Callable[..., Path]) -> None:
    model = tiny_model_dir("llama")
    command = [PROGRAM, "serve", *FREE_PORTS, f"--model={model}", "--set=max_model_len=100000"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 1
    assert run.stdout == ""
    assert "error: " in run.stderr
    reason = run.stderr[run.stderr.rindex("error: ") :]
    assert "max_model_len" in reason and "512" in reason
