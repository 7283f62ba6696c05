"""How long an engine takes to load, and the memory it then has: each time in a process of its own.

The bound of the load is reading the weights once, at the bandwidth of the page cache.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tandem_perf.micro.figure import Bound, Figure, MicroOptions, time_figure
from tandem_perf.micro.timing import Timing, spread

_LOAD = """
import json, sys, time
started_s = time.monotonic()
import torch
from transformers.utils import logging
from tandem.engine.model import load_model
logging.disable_progress_bar()
torch.set_num_threads(int(sys.argv[3]))
imported_s, imported_cpu_s = time.monotonic(), time.process_time()
load_model(sys.argv[1], sys.argv[2], "cpu")
lines = open("/proc/self/status").read().splitlines()
kb = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.endswith(" kB")}
print(json.dumps({
    "import_s": imported_s - started_s,
    "load_s": time.monotonic() - imported_s,
    "import_cpu_s": imported_cpu_s,
    "load_cpu_s": time.process_time() - imported_cpu_s,
    "private_bytes": 1024 * kb["RssAnon"],
    "shared_bytes": 1024 * (kb["RssFile"] + kb["RssShmem"]),
}))
"""


def run(options: MicroOptions) -> Iterator[Figure]:
    loads = [_load_once(options) for _ in range(max(2, options.repeats // 2))]
    weights = sorted(Path(options.model_dir).glob("*.safetensors"))
    num_bytes = sum(path.stat().st_size for path in weights)
    read_s = min(_read_once(weights) for _ in range(3))
    reading = Bound(value=read_s, reason=f"reading {num_bytes / 1e6:.0f} MB once")
    for what, key in (
        ("import torch and transformers", "import"),
        ("load the model", "load"),
    ):
        seconds = tuple(load[f"{key}_s"] for load in loads)
        timing = Timing(seconds, tuple(load[f"{key}_cpu_s"] for load in loads))
        yield time_figure("start", what, "s", timing, 1.0, reading)
    held = Bound(value=num_bytes / 1e6, reason="the weights")
    for what, key in (
        ("memory of its own", "private_bytes"),
        ("memory mapped from files", "shared_bytes"),
    ):
        megabytes = spread(load[key] / 1e6 for load in loads)
        yield Figure(
            part="start", what=what, unit="MB", wall=megabytes, cpu=megabytes, busy=1.0, bound=held
        )


def _load_once(options: MicroOptions) -> dict[str, float]:
    command = [sys.executable, "-c", _LOAD, str(options.model_dir), options.dtype]
    done = subprocess.run(
        [*command, str(options.threads)], stdout=subprocess.PIPE, text=True, check=True
    )
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def _read_once(paths: list[Path]) -> float:
    started_s = time.perf_counter()
    for path in paths:
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass
    return time.perf_counter() - started_s
