"""The one way to pull: fence, copy, fence again, release. The same over every transport."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

from tandem.errors import PullFailed
from tandem.kv.handle import KVHandle
from tandem.kv.lease_board import check_fence
from tandem.transport.base import Peer, Slab, Transport


class PullResult(NamedTuple):
    num_bytes: int
    seconds: float


class FencedPuller:
    """Pulls blocks of other engines into one slab. Safe to call from several threads; connections
    are kept per incarnation and dropped once their process is gone or a pull has shown them broken.
    An engine that does not answer delays nobody but its own pulls.
    """

    def __init__(self, transport: Transport, slab: Slab, timeout_s: float) -> None:
        self._transport = transport
        self._slab = slab
        self._timeout_s = timeout_s
        self._peers: dict[str, Future[Peer]] = {}
        self._lock = threading.Lock()

    def pull(self, handle: KVHandle, remote: Sequence[int], local: Sequence[int]) -> PullResult:
        """Copies the blocks and ends the lease; raises ``PullFailed`` / ``FenceBroken``, and then
        what is in the local blocks must not be used.
        """
        started = time.monotonic()
        peer = self._peer(handle)
        try:
            check_fence(peer.read_slot(handle.slot), handle.generation)
            num_bytes = peer.pull(remote, self._slab, local, self._timeout_s)
            check_fence(peer.read_slot(handle.slot), handle.generation)
        except PullFailed:
            with self._lock:
                self._drop_dead_peers()
            raise
        peer.release(handle.slot, handle.generation)
        return PullResult(num_bytes, time.monotonic() - started)

    def close(self) -> None:
        with self._lock:
            for peer in self._connected().values():
                peer.close()
            self._peers.clear()

    def _peer(self, handle: KVHandle) -> Peer:
        """The connection to the handle's exporter; whoever comes first makes it."""
        with self._lock:
            connection = self._peers.get(handle.incarnation)
            is_mine = connection is None
            if connection is None:
                self._drop_dead_peers()
                connection = self._peers[handle.incarnation] = Future()
        if is_mine:
            try:
                peer = self._transport.connect(handle.endpoint, handle.incarnation)
                connection.set_result(peer)
            except BaseException as error:
                with self._lock:
                    del self._peers[handle.incarnation]
                connection.set_exception(error)
        return connection.result()

    def _connected(self) -> dict[str, Peer]:
        return {
            incarnation: connection.result()
            for incarnation, connection in self._peers.items()
            if connection.done() and connection.exception() is None
        }

    def _drop_dead_peers(self) -> None:
        for incarnation, peer in self._connected().items():
            if not peer.is_alive:
                del self._peers[incarnation]
                peer.close()
