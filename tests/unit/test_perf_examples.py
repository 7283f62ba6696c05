"""Scripts beside the example deployments, run on processes that stand for servers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

EXAMPLES = Path(__file__).parents[2] / "perf" / "examples"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_worker_that_moved_goes_back_to_the_cores_of_its_server() -> None:
    first, second, *_ = sorted(os.sched_getaffinity(0))
    script = f"taskset -c {second} sh -c 'echo $$; exec sleep 60' & wait"
    server = f'taskset -c {first} sh -c "{script}" & wait'.replace("$$", r"\$\$")
    group = subprocess.Popen(["sh", "-c", server], stdout=subprocess.PIPE, text=True)
    try:
        assert group.stdout is not None
        worker = psutil.Process(int(group.stdout.readline()))
        assert worker.cpu_affinity() == [second]
        command = [sys.executable, str(EXAMPLES / "pin_vllm_threads.py"), str(group.pid)]
        subprocess.run(command, check=True, timeout=60)
        assert worker.cpu_affinity() == [first]
    finally:
        for process in psutil.Process(group.pid).children(recursive=True):
            process.kill()
        group.wait(10)
