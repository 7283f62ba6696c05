"""``tandem serve`` starts, stops and is killed: no process and no file of it is ever left."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from running_server import wait_until
from serving_program import (
    FREE_PORTS,
    GONE_WITHIN_S,
    PROGRAM,
    Serving,
    Streams,
    ask,
    is_alive,
    started,
    tandem_serve,
    up,
)
from tandem_cli.ports import Ports, choose_ports
from tandem_cli.repository import DEFAULT_REPOSITORY
from tandem_cli.runtime_dir import SHM
from tandem_cli.triton import triton_installation
from tandem_client import Completion, Unavailable

READY_WITHIN_S = 180.0
SMALL_SHM = "mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "


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


def tandem(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, timeout=60)


def assert_told_of_the_stop(streams: Streams) -> None:
    """They outlasted the grace, and each got a final error."""
    for end in streams.ends:
        assert isinstance(end, Unavailable), end
        assert "the server is stopping and cannot wait for this request" in str(end)


def can_mount() -> bool:
    command = ["unshare", "-m", "sh", "-c", SMALL_SHM + "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


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
        streams = Streams(serving.urls * 4, max_tokens=400)
        assert serving.stop() == 0
        streams.join()
        assert len(streams.ends) == 8
        for end in streams.ends:
            assert isinstance(end, Completion), end
            assert end.text == whole.text
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
        probed = tandem("health", "--url", serving.ready["http"])
        assert probed.returncode == 0, probed.stderr
        assert "local: ok, prefill at decode_0_0, decode at decode_0_0\n" in probed.stdout
        assert "remote: ok, prefill at prefill_0_0, decode at decode_0_0, " in probed.stdout
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
    options = ("--policy=never", "--decode-instances=2", "--drain-timeout=0")
    with tandem_serve(tiny_model_dir("llama"), *options, before=in_small_shm) as serving:
        assert (serving.ready["policy"], serving.ready["prefill"]) == ("never", "0")
        answers = [ask(serving) for _ in range(8)]
        assert len({answer.text for answer in answers}) == 1
        workers = {answer.timings.decode_worker for answer in answers}
        assert workers == {"decode_0_0", "decode_0_1"}
        assert {answer.timings.path for answer in answers} == {"local"}
        runtime_dir = serving.runtime_dir
        streams = Streams(serving.urls * 4, max_tokens=480)
        assert serving.stop(signal.SIGINT) == 0
        streams.join()
        for end in streams.ends:  # a tiny model is fast: some may be complete
            assert isinstance(end, Completion | Unavailable), end
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
        address = "127.0.0.1"
        serving.ready = {"grpc": f"{address}:{ports.grpc}", "http": f"http://{address}:{ports.http}"}
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
        streams = Streams(serving.urls, max_tokens=1500)
        health = ("health", "--url", serving.ready["http"])
        assert tandem(*health).returncode == 0
        drained = tandem("drain", f"--runtime-dir={runtime_dir}", "--grace=0.3")
        assert (drained.returncode, drained.stdout) == (0, "drained\n"), drained.stderr
        streams.join()
        assert_told_of_the_stop(streams)
        refused = tandem(*health)
        assert refused.returncode == 1 and "the server is draining" in refused.stderr
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
