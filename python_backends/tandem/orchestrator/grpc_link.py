"""The link to pools on other servers: Triton's gRPC."""

from __future__ import annotations

from collections.abc import Mapping

from tandem.errors import Unavailable
from tandem.orchestrator.link import TritonLink
from tandem.orchestrator.remote_pool import RemotePool
from tandem.types import Role


class GRPCLink(TritonLink):
    """Owned by the event loop that starts it."""

    def __init__(self, pools: Mapping[Role, RemotePool]) -> None:
        self._pools = pools

    async def start(self) -> None:
        for pool in self._pools.values():
            await pool.start()

    async def stop(self) -> None:
        for pool in self._pools.values():
            await pool.stop()

    async def call(
        self, role: Role, request: bytes, handle: bytes, worker: str | None
    ) -> tuple[bytes, bytes]:
        if role not in self._pools:
            raise Unavailable(f"there is no {role} pool")
        return await self._pools[role].choose(worker).call(request, handle)
