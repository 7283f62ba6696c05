"""Puts all threads of a server's processes on the cores that the server was started on.

``python pin_vllm_threads.py PID``: the servers are the children of PID. With NixlConnector vLLM
moves the thread that computes to the machine's last core, wherever the server was started, so
that two engines share that core.
"""

from __future__ import annotations

import os
import sys

import psutil


def main() -> None:
    for server in psutil.Process(int(sys.argv[1])).children():
        cores = server.cpu_affinity()
        for process in server.children(recursive=True):
            for thread in process.threads():
                os.sched_setaffinity(thread.id, cores)


if __name__ == "__main__":
    main()
