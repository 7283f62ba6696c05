"""Watches the lease board beside the engine loop: a long step must not keep a lease alive."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tandem.engine.events import LeaseEnded
from tandem.engine.vital_thread import VitalThread
from tandem.kv.lease_board import LeaseBoard

PERIOD_S = 0.02


class LeaseTimer:
    def __init__(self, board: LeaseBoard, post: Callable[[LeaseEnded], None]) -> None:
        self._board = board
        self._post = post
        self._stopping = threading.Event()
        self._thread = VitalThread(self._run, name="lease-timer")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(timeout=2)

    def _run(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            if not self._board.wait_for_leases(timeout_s=0.5):
                continue
            for lease, was_released in self._board.collect():
                self._post(LeaseEnded(lease, was_released))
