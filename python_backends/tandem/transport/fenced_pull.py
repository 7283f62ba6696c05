"""The one way to pull: fence, copy, fence again, release. The same over every transport."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from tandem.kv.handle import KVHandle
from tandem.kv.lease_board import check_fence
from tandem.transport.base import Bytes, Peer, Transport


class PullResult(NamedTuple):
    num_bytes: int
    seconds: float


class FencedPuller:
    """Pulls blocks of other engines into one slab. Safe to call from several threads; connections
    are kept per incarnation and dropped once their process is gone.
    """

    def __init__(self, transport: Transport, slab: Bytes, timeout_s: float) -> None:
        self._transport = transport
        self._slab = slab
        self._timeout_s = timeout_s
        self._peers: dict[str, Peer] = {}
        self._lock = threading.Lock()

    def pull(self, handle: KVHandle, remote: Sequence[int], local: Sequence[int]) -> PullResult:
        """Copies the blocks and ends the lease; raises ``PullFailed`` / ``FenceBroken``, and then
        what is in the local blocks must not be used.
        """
        started = time.monotonic()
        peer = self._peer(handle)
        check_fence(peer.read_slot(handle.slot), handle.generation)
        num_bytes = peer.pull(remote, self._slab, local, self._timeout_s)
        check_fence(peer.read_slot(handle.slot), handle.generation)
        peer.release(handle.slot, handle.generation)
        return PullResult(num_bytes, time.monotonic() - started)

    def close(self) -> None:
        with self._lock:
            for peer in self._peers.values():
                peer.close()
            self._peers.clear()

    def _peer(self, handle: KVHandle) -> Peer:
        with self._lock:
            if handle.incarnation not in self._peers:
                self._drop_dead_peers()
                self._peers[handle.incarnation] = self._transport.connect(
                    handle.endpoint, handle.incarnation
                )
            return self._peers[handle.incarnation]

    def _drop_dead_peers(self) -> None:
        for incarnation, peer in list(self._peers.items()):
            if not peer.is_alive:
                del self._peers[incarnation]
                peer.close()
