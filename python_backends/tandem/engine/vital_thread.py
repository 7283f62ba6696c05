"""Threads that an engine cannot live without."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EXIT_CODE = 70
_log = logging.getLogger(__name__)


@contextmanager
def ends_process(what: str) -> Iterator[None]:
    """An exception inside ends the process at once, so that the shim starts another engine: no
    pull, no other thread and no broken device is waited for.
    """
    try:
        yield
    except Exception:
        _log.critical("%s has failed; the engine ends", what, exc_info=True)
        os._exit(EXIT_CODE)


class VitalThread(threading.Thread):
    """Without one of its threads an engine would look alive and do half of its work."""

    def __init__(self, run: Callable[[], None], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._run_vital = run

    def run(self) -> None:
        with ends_process(f"thread {self.name}"):
            self._run_vital()
