"""Small pieces of registered memory for lease slots and headers on their way."""

from __future__ import annotations

import mmap
import queue
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import numpy as np

from tandem.errors import PullFailed
from tandem.transport.base import Bytes, RegionShape

NUM_CELLS = 64


class Cell:
    """One piece. ``settled`` is the transfer that uses it, if one was begun."""

    def __init__(self, view: Bytes) -> None:
        self.view = view
        self.address: int = view.ctypes.data
        self.settled: Future[None] | None = None


class Scratch:
    """Cells of ``RegionShape.HEADER_BYTES`` each; safe to use from several threads."""

    def __init__(self, num_cells: int = NUM_CELLS) -> None:
        size = RegionShape.HEADER_BYTES
        self.buffer: Bytes = np.frombuffer(mmap.mmap(-1, num_cells * size), dtype=np.uint8)
        self._free: queue.SimpleQueue[Cell] = queue.SimpleQueue()
        for row in self.buffer.reshape(num_cells, size):
            self._free.put(Cell(row))

    @contextmanager
    def cell(self) -> Iterator[Cell]:
        try:
            cell = self._free.get_nowait()
        except queue.Empty:
            raise PullFailed("too many copies have not come to their end") from None
        try:
            yield cell
        finally:
            if cell.settled is None:
                self._free.put(cell)
            else:  # given up: bytes may still land in it
                cell.settled.add_done_callback(lambda _: self._give_back(cell))

    def _give_back(self, cell: Cell) -> None:
        cell.settled = None
        self._free.put(cell)
