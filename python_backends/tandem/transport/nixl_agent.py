"""One NIXL agent and the thread that owns it.

NIXL has neither deadlines nor a cancel that holds: bytes of a transfer that was given up, released
or whose peer was removed still land once the peer goes on. So a transfer here is a future that is
done when the transfer is *terminal*, never earlier. A caller waits for it as long as it likes; the
thread goes on asking, and only then lets go of the transfer's handle and of its peer.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tandem.errors import ConfigError, PullFailed, TandemError

Descriptors = npt.NDArray[np.uint64]  # [n, 3]: address, bytes, device id
_T = TypeVar("_T")
_log = logging.getLogger(__name__)

_PROGRESS_PERIOD_US = 1000  # NIXL's own wrapper sets 0, and burns a core while idle
_CALL_TIMEOUT_S = 60.0  # of calls that involve no peer; creating a backend takes half a second
_MIN_PAUSE_S, _MAX_PAUSE_S = 20e-6, 0.01
_WHEELS = ("nixl_cu12", "nixl_cu13")


class Op(StrEnum):
    READ = "NIXL_READ"
    WRITE = "NIXL_WRITE"


@dataclass(frozen=True)
class _Transfer:
    handle: int
    peer: str
    started_s: float
    settled: Future[None]


class NixlAgent:
    """Safe to call from any thread; everything of NIXL is touched by the thread ``nixl`` only.

    ``backend`` is NIXL's plugin name, ``options`` are those of the plugin. An agent whose memory
    others reach ``serves``: a thread of NIXL answers them, however busy the interpreter is. One
    that only pulls does without; the two threads would halve its rate. Raises ``ConfigError`` if
    the backend cannot be had on this machine.
    """

    def __init__(self, backend: str, options: Mapping[str, str], *, serves: bool) -> None:
        self.name = uuid.uuid4().hex  # never the name of an earlier start
        self._bindings = _load_bindings()
        self._agent: Any = None  # made and ended on the owner thread
        self._backend = 0
        self._commands: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._transfers: list[_Transfer] = []
        self._leaving: set[str] = set()  # peers to be removed with their last transfer
        self._thread = threading.Thread(target=self._run, name="nixl", daemon=True)
        self._thread.start()
        try:
            self._call(lambda: self._open(backend, dict(options), serves))
        except PullFailed as error:
            self.close()
            raise ConfigError(f"NIXL has no backend {backend} here: {error}") from error

    def register(self, address: int, num_bytes: int) -> None:
        """Host memory that transfers may touch from now on; it must outlive the agent."""

        def register() -> None:
            bindings = self._bindings
            regions = bindings.nixlRegDList(bindings.DRAM_SEG, [(address, num_bytes, 0, "")])
            self._agent.registerMem(regions, [self._backend])

        self._call(register)

    def metadata(self) -> bytes:
        """How others reach all memory that is registered by now."""
        return self._call(lambda: bytes(self._agent.getLocalMD()))

    def add_peer(self, name: str, metadata: bytes) -> None:
        def add() -> None:
            if name in self._leaving:
                raise PullFailed("an earlier copy from this peer has not come to its end")
            loaded = self._agent.loadRemoteMD(metadata)
            if loaded != name.encode():
                self._agent.invalidateRemoteMD(loaded)
                raise PullFailed(f"metadata of agent {loaded!r} instead of {name!r}")

        self._call(add)

    def remove_peer(self, name: str) -> None:
        """Disconnects, as soon as no transfer with the peer is under way."""

        def remove() -> None:
            self._leaving.add(name)
            self._remove_idle(name)

        self._call(remove)

    def transfer(self, op: Op, peer: str, local: Descriptors, remote: Descriptors) -> Future[None]:
        """Copies between pairs of ranges. Done when no byte can land any more: with a
        ``PullFailed``, or in success. Never cancel the future.
        """
        settled: Future[None] = Future()
        self._commands.put(lambda: self._post(op, peer, local, remote, settled))
        return settled

    def close(self) -> None:
        """Ends the thread and the agent. Transfers under way fail."""
        self._commands.put(None)
        self._thread.join(timeout=10)

    # ---- the owner thread ------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                command = self._commands.get(timeout=self._pause_s())
                if command is None:
                    break
                command()
            except queue.Empty:
                pass
            self._poll()
        self._agent = None  # destroys it; nothing lands after that
        for transfer in self._transfers:
            transfer.settled.set_exception(PullFailed("the transport was closed"))

    def _pause_s(self) -> float | None:
        """Short for a transfer that has just begun, longer the longer it takes."""
        if not self._transfers:
            return None
        age_s = time.monotonic() - self._transfers[-1].started_s
        return min(max(age_s / 100, _MIN_PAUSE_S), _MAX_PAUSE_S)

    def _open(self, backend: str, options: dict[str, str], serves: bool) -> None:
        config = self._bindings.nixlAgentConfig()
        config.useProgThread = serves
        config.pthrDelay = _PROGRESS_PERIOD_US
        config.useListenThread = False
        config.syncMode = self._bindings.NIXL_THREAD_SYNC_RW
        self._agent = self._bindings.nixlAgent(self.name, config)
        self._backend = self._agent.createBackend(backend, options)

    def _post(
        self, op: Op, peer: str, local: Descriptors, remote: Descriptors, settled: Future[None]
    ) -> None:
        bindings = self._bindings
        try:
            if peer in self._leaving:
                raise PullFailed("the connection was closed")
            handle = self._agent.createXferReq(
                getattr(bindings, op),
                bindings.nixlXferDList(bindings.DRAM_SEG, local),
                bindings.nixlXferDList(bindings.DRAM_SEG, remote),
                peer,
                "",
                [self._backend],
            )
            self._transfers.append(_Transfer(handle, peer, time.monotonic(), settled))
            self._agent.postXferReq(handle, "")
        except Exception as error:  # NIXL's exceptions have no base of their own
            if self._transfers and self._transfers[-1].settled is settled:
                self._settle(self._transfers[-1], error)
            else:
                settled.set_exception(_as_pull_failed(error))

    def _poll(self) -> None:
        for transfer in list(self._transfers):
            try:
                state = self._agent.getXferStatus(transfer.handle)
            except Exception as error:
                self._settle(transfer, error)
            else:
                if state != self._bindings.NIXL_IN_PROG:
                    failed = state != self._bindings.NIXL_SUCCESS
                    self._settle(transfer, PullFailed(f"NIXL: {state}") if failed else None)

    def _settle(self, transfer: _Transfer, error: Exception | None) -> None:
        self._transfers.remove(transfer)
        try:
            self._agent.releaseXferReq(transfer.handle)
            self._remove_idle(transfer.peer)
        except Exception:  # the thread must go on; what was not released is lost, not wrong
            _log.exception("NIXL did not let go of a transfer")
        if error is None:
            transfer.settled.set_result(None)
        else:
            transfer.settled.set_exception(_as_pull_failed(error))

    def _remove_idle(self, peer: str) -> None:
        if peer in self._leaving and all(t.peer != peer for t in self._transfers):
            self._leaving.remove(peer)
            self._agent.invalidateRemoteMD(peer)

    def _call(self, function: Callable[[], _T]) -> _T:
        """Runs it on the owner thread."""
        result: Future[_T] = Future()

        def run() -> None:
            try:
                result.set_result(function())
            except Exception as error:
                result.set_exception(_as_pull_failed(error))

        self._commands.put(run)
        return result.result(_CALL_TIMEOUT_S)


def _as_pull_failed(error: Exception) -> TandemError:
    if isinstance(error, TandemError):
        return error
    return PullFailed(f"NIXL: {type(error).__name__}: {error}")


def _load_bindings() -> Any:
    """NIXL's own wrapper forces an unsafe thread mode and a busy progress thread on an agent."""
    for wheel in _WHEELS:
        try:
            return import_module(f"{wheel}._bindings")
        except ImportError:
            continue
    raise ConfigError("transport = 'nixl': install NIXL, e.g. pip install 'tandem-triton[rdma]'")
