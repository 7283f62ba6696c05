"""Ctrl-C and SIGTERM while a load runs."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from tandem_perf.load import Load

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_on_signals(load: Load) -> Iterator[None]:
    """The first signal stops the load; a second one ends the program at once."""
    loop = asyncio.get_running_loop()
    added: list[signal.Signals] = []

    def remove() -> None:
        while added:
            loop.remove_signal_handler(added.pop())

    def stop() -> None:
        remove()
        load.stop()

    try:
        for number in _SIGNALS:
            loop.add_signal_handler(number, stop)
            added.append(number)
    except (ValueError, RuntimeError):
        pass  # not the main thread: no signal comes here
    try:
        yield
    finally:
        remove()
