"""Stubs of Triton die: those of the pools come back under the streams, that of llm ends the server.

So does ``tandem drain``, in good order.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil

from running_server import wait_until
from serving_program import PROGRAM, Serving, Streams, ask, tandem_serve
from tandem_cli.health import probe
from tandem_client import Completion, TandemClientError

BACK_WITHIN_S = 60.0


def stub(serving: Serving, instance: str) -> psutil.Process:
    return serving.find("python_backend_stub", instance)


def kill_and_wait(serving: Serving, model: str) -> None:
    """Until the watchdog has loaded the model again."""
    num_before = sum(f"{model} serves again" in line for line in serving.log)
    stub(serving, f"{model}_0_0").kill()
    wait_until(
        lambda: sum(f"{model} serves again" in line for line in serving.log) > num_before,
        BACK_WITHIN_S,
    )


def test_stubs_die_one_after_the_other(tiny_model_dir: Callable[..., Path]) -> None:
    with tandem_serve(tiny_model_dir("llama")) as serving:
        runtime_dir, url = serving.runtime_dir, serving.ready["http"]
        whole = ask(serving, max_tokens=400, ignore_eos=True, temperature=0)
        streams = Streams(serving.urls, max_tokens=400)
        kill_and_wait(serving, "decode")
        streams.join()
        for end in streams.ends:
            assert isinstance(end, Completion), end
            assert end.text == whole.text
        kill_and_wait(serving, "prefill")
        assert probe(url, "remote", 30).startswith("ok, prefill at prefill_0_0")
        kill_and_wait(serving, "preprocess")
        with serving.client(model="ensemble") as client:
            assert client.generate("hello the world", max_tokens=8).num_output_tokens == 8

        streams = Streams(serving.urls, max_tokens=400)
        serving.meet()
        stub(serving, "llm_0_0").kill()
        code = serving.process.wait(20)
        # Triton itself may abort: the stub can die with a lock of its shared memory.
        assert code in (1, 128 + signal.SIGABRT)
        streams.join()
        for end in streams.ends:  # nobody waits for ever
            assert isinstance(end, TandemClientError) or end.text == whole.text
        if code == 1:
            assert any("the process of the model llm has died" in line for line in serving.log)
        serving.assert_nothing_is_left(runtime_dir)


def test_a_drain_ends_the_server_when_its_streams_have_ended(
    tiny_model_dir: Callable[..., Path],
) -> None:
    with tandem_serve(tiny_model_dir("llama")) as serving:
        runtime_dir = serving.runtime_dir
        streams = Streams(serving.urls, max_tokens=200)
        serving.meet()
        command = [PROGRAM, "drain", f"--runtime-dir={runtime_dir}"]
        subprocess.run(command, check=True, timeout=60)
        assert serving.process.wait(60) == 0
        streams.join()
        assert all(isinstance(end, Completion) for end in streams.ends), streams.ends
        serving.assert_nothing_is_left(runtime_dir)
