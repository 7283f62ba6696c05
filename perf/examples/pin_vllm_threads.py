"""Puts all threads of each vLLM engine on the cores that its OpenMP threads are bound to.

``python pin_vllm_threads.py PID``: of the process and its descendants, those that have
VLLM_CPU_OMP_THREADS_BIND in their environment. NixlConnector moves the thread that computes to
the machine's last core, wherever it was before, so that two engines would share that core.
"""

from __future__ import annotations

import os
import sys

import psutil

from tandem_perf.process_group import core_set


def pin(process: psutil.Process) -> None:
    cores = core_set(process.environ().get("VLLM_CPU_OMP_THREADS_BIND", ""))
    for thread in process.threads() if cores else ():
        os.sched_setaffinity(thread.id, cores)


def main() -> None:
    root = psutil.Process(int(sys.argv[1]))
    for process in [root, *root.children(recursive=True)]:
        try:
            pin(process)
        except (psutil.NoSuchProcess, ProcessLookupError):  # it ended meanwhile
            continue


if __name__ == "__main__":
    main()
