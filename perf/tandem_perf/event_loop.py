"""Runs a coroutine, on uvloop where it is installed."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from importlib import import_module
from typing import Any, TypeVar

_T = TypeVar("_T")


def run(work: Coroutine[Any, Any, _T]) -> _T:
    try:
        factory = import_module("uvloop").new_event_loop
    except ImportError:
        factory = None
    gc.collect()
    gc.freeze()  # prepared requests are many objects: no pause of the run to look through them
    try:
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(work)
    finally:
        gc.unfreeze()
