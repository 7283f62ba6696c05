"""Moves threads that spin while nothing is to do to the idle scheduling class.

``python demote_busy_threads.py PID``: looks for two seconds at all threads of the process and its
descendants, which must be idle, and demotes those that were running most of the time. Never a
process's first thread: in vLLM that one computes.
"""

from __future__ import annotations

import os
import sys
import time

import psutil

WATCH_S = 2.0
BUSY_SHARE = 0.2  # two that spin on one core have half of it each, less on a busy machine


def thread_times(pid: int) -> dict[int, float]:
    """CPU seconds by thread id."""
    times: dict[int, float] = {}
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        try:
            threads = process.threads()
        except psutil.NoSuchProcess:
            continue
        times |= {t.id: t.user_time + t.system_time for t in threads if t.id != process.pid}
    return times


def main() -> None:
    before = thread_times(int(sys.argv[1]))
    time.sleep(WATCH_S)
    for thread, cpu_s in thread_times(int(sys.argv[1])).items():
        share = (cpu_s - before.get(thread, cpu_s)) / WATCH_S
        if share >= BUSY_SHARE:
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
            print(f"thread {thread} was busy for {share:.0%}: demoted")


if __name__ == "__main__":
    main()
