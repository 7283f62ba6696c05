"""The servers of one pool on other hosts: found by name, and chosen."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence

from tandem.addresses import ServerAddress
from tandem.errors import Unavailable
from tandem.orchestrator.remote_server import Probing, RemoteServer
from tandem.types import Role

RESOLVE_EVERY_S = 5.0
Resolve = Callable[[ServerAddress], Awaitable[set[str]]]
_log = logging.getLogger(__name__)


async def resolve(address: ServerAddress) -> set[str]:
    """All of a name's addresses, with the port; raises ``OSError`` if there is none."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    return {str(ServerAddress(str(sockaddr[0]), address.port)) for *_, sockaddr in found}


class RemotePool:
    """Owned by the orchestrator's event loop. A name that cannot be resolved keeps its servers."""

    def __init__(
        self,
        role: Role,
        addresses: Sequence[ServerAddress],
        *,
        resolve: Resolve = resolve,
        resolve_every_s: float = RESOLVE_EVERY_S,
        probing: Probing | None = None,
    ) -> None:
        self._role = role
        self._known: dict[ServerAddress, set[str]] = {address: set() for address in addresses}
        self._resolve = resolve
        self._resolve_every_s = resolve_every_s
        self._probing = probing or Probing()
        self._servers: dict[str, RemoteServer] = {}
        self._leaving: dict[asyncio.Task[None], RemoteServer] = {}

    async def start(self) -> None:
        await self._look_up()
        self._resolving = asyncio.create_task(self._keep_resolving())

    async def stop(self) -> None:
        self._resolving.cancel()
        await asyncio.gather(self._resolving, return_exceptions=True)
        for server in (*self._servers.values(), *self._leaving.values()):
            await server.close(wait=False)
        await asyncio.gather(*self._leaving)

    @property
    def servers(self) -> list[RemoteServer]:
        return list(self._servers.values())

    def choose(self, worker: str | None) -> RemoteServer:
        """The server of that worker, or the one with the fewest calls. But first one of which
        nothing is known yet: nobody could ask for its workers.
        """
        healthy = [server for server in self.servers if server.is_healthy]
        if not healthy:
            known = ", ".join(sorted(self._servers)) or "none has an address"
            raise Unavailable(f"no {self._role} server answers ({known})")
        new = [server for server in healthy if not server.workers and not server.num_calls]
        wanted = [server for server in healthy if worker in server.workers]
        return min(new or wanted or healthy, key=lambda server: server.num_calls)

    async def _keep_resolving(self) -> None:
        while True:
            await asyncio.sleep(self._resolve_every_s)
            await self._look_up()

    async def _look_up(self) -> None:
        for address in self._known:
            try:
                self._known[address] = await self._resolve(address)
            except (OSError, UnicodeError) as error:  # no such name; none that DNS could have
                _log.warning("%s servers: %s cannot be resolved: %s", self._role, address, error)
        wanted = set().union(*self._known.values())
        for new in sorted(wanted - self._servers.keys()):
            self._servers[new] = RemoteServer(self._role, new, self._probing)
        for old in self._servers.keys() - wanted:
            server = self._servers.pop(old)
            leaving = asyncio.create_task(server.close(wait=True))
            self._leaving[leaving] = server
            leaving.add_done_callback(self._leaving.pop)
