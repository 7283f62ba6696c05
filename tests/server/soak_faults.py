"""Engines of a running server are killed and stopped at random, again and again."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

import psutil

from running_server import metric, wait_until
from server_processes import processes
from tandem_cli.server import TandemServer

BACK_WITHIN_S = 90.0  # the load time, and a backoff for an engine that died young
MAX_PAUSE_S = 4.0  # between an engine's return and the next fault
FAULTS = {"kill": 4, "kill two": 1, "pause": 3, "freeze": 1}  # and their weights


class Faults:
    """A thread of its own; ``stop`` waits until every engine is back and raises what went wrong."""

    def __init__(self, server: TandemServer, rng: random.Random) -> None:
        self.done: Counter[str] = Counter()
        self._server = server
        self._rng = rng
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="faults", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(2 * BACK_WITHIN_S)
        assert not self._thread.is_alive()
        if self._error:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._stopping.wait(self._rng.uniform(0.2, MAX_PAUSE_S)):
                self._disturb()
        except BaseException as error:  # told by stop()
            self._error = error

    def _disturb(self) -> None:
        engines = _engines(self._server)
        [fault] = self._rng.choices(tuple(FAULTS), tuple(FAULTS.values()))
        workers = self._rng.sample(sorted(engines), 2 if fault == "kill two" else 1)
        num_before = {worker: self._num_restarts(worker) for worker in workers}
        victims = [engines[worker] for worker in workers]
        self.done[fault] += 1
        if fault == "pause":  # may or may not count as a death
            _pause(victims, self._rng.uniform(0.1, 4.0))
            num_before = {}
        elif fault == "freeze":
            _signal(victims, "suspend")
        else:
            _signal(victims, "kill")
        wait_until(
            lambda: all(self._num_restarts(w) > n for w, n in num_before.items()), BACK_WITHIN_S
        )
        wait_until(self._is_up, BACK_WITHIN_S)

    def _num_restarts(self, worker: str) -> float:
        return metric(self._server, "tandem_engine_restarts_total", worker=worker)

    def _is_up(self) -> bool:
        names = processes(self._server)
        workers = [name for name in names if name.startswith(("prefill_", "decode_"))]
        return metric(self._server, "tandem_engine_up") == len(workers)


def _engines(server: TandemServer) -> dict[str, psutil.Process]:
    found = processes(server).items()
    return {n.removeprefix("engine "): p for n, p in found if n.startswith("engine ")}


def _pause(victims: Sequence[psutil.Process], seconds: float) -> None:
    _signal(victims, "suspend")
    time.sleep(seconds)
    _signal(victims, "resume")


def _signal(victims: Sequence[psutil.Process], name: str) -> None:
    for victim in victims:
        with suppress(psutil.NoSuchProcess):
            getattr(victim, name)()
