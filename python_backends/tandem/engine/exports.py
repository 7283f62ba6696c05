"""What this engine offers to others: leases on finished prefills, and handles that name them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from tandem.kv import handle as kv_handle
from tandem.kv.block_manager import BlockManager
from tandem.kv.handle import KVHandle
from tandem.kv.lease_board import Lease, LeaseBoard

MAX_RENEWALS = 10  # a handle is worthless this many ttls after it was issued, whatever happens


class Identity(NamedTuple):
    """Who exports: part of every handle."""

    incarnation: str
    transport: str
    endpoint: str
    fingerprint: str


class Exports:
    """Owned by the engine loop; only ``board.collect`` is called from the lease timer."""

    def __init__(
        self,
        identity: Identity,
        secret: bytes,
        board: LeaseBoard,
        blocks: BlockManager,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.board = board
        self._identity = identity
        self._secret = secret
        self._blocks = blocks
        self._wall_clock = wall_clock
        self._leased: dict[Lease, tuple[str, list[int]]] = {}  # sequence id, blocks
        self._lease_of: dict[str, Lease] = {}

    def issue(self, sequence_id: str, block_ids: list[int], num_tokens: int, token: int) -> bytes:
        """A signed handle for blocks that ``BlockManager.lease`` has set aside."""
        lease = self.board.grant()
        self._leased[lease] = (sequence_id, block_ids)
        self._lease_of[sequence_id] = lease
        handle = KVHandle(
            version=kv_handle.VERSION,
            incarnation=self._identity.incarnation,
            transport=self._identity.transport,
            endpoint=self._identity.endpoint,
            fingerprint=self._identity.fingerprint,
            block_ids=tuple(block_ids),
            num_tokens=num_tokens,
            slot=lease.slot,
            generation=lease.generation,
            expires_unix_s=self._wall_clock() + MAX_RENEWALS * self.board.ttl_s,
            sequence_id=sequence_id,
            first_token=token,
        )
        return kv_handle.sign(handle, self._secret)

    def renew(self, sequence_id: str) -> None:
        if sequence_id in self._lease_of:
            self.board.renew(self._lease_of[sequence_id])

    def revoke(self, sequence_id: str) -> bool:
        """Ends the lease of a cancelled sequence; False if it has none."""
        lease = self._lease_of.get(sequence_id)
        if lease is None:
            return False
        # If the timer ended it meanwhile, its ``ended`` event frees the blocks.
        if self.board.revoke(lease):
            self.ended(lease)
        return True

    def ended(self, lease: Lease) -> None:
        """The lease was fenced off (released, expired or revoked): its blocks can be reused."""
        sequence_id, block_ids = self._leased.pop(lease)
        if self._lease_of.get(sequence_id) == lease:  # or else the id was used again
            del self._lease_of[sequence_id]
        self._blocks.unlease(block_ids)
