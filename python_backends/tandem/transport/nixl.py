"""KV between hosts over NIXL: RDMA where the network has it, TCP where not.

The puller reads blocks and lease slots straight from the exporter's registered memory and writes
releases into it; the exporter's interpreter takes no part. Block ids are turned into addresses
here, from what the exporter said when it was met, and only after their bounds were checked.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from tandem.errors import PullFailed, PullTimedOut
from tandem.kv.lease_board import SLOT_DTYPE, Slot
from tandem.transport.base import Bytes, RegionShape, Slab
from tandem.transport.introduction import VERSION, Acquaintance, Introduction, IntroductionServer
from tandem.transport.network import interface_of
from tandem.transport.nixl_agent import Descriptors, NixlAgent, Op
from tandem.transport.region import (
    RegionView,
    check_pull,
    contiguous_runs,
    populate,
    read_header,
    write_header,
)
from tandem.transport.scratch import Cell, Scratch

_RELEASED = "released_generation"


@dataclass(frozen=True)
class NixlOptions:
    """``host``: address under which other hosts reach this one. ``ucx``: UCX settings by their
    names without ``UCX_``; what is not named comes from the environment.
    """

    host: str = "127.0.0.1"
    backend: str = "UCX"  # UCX | LIBFABRIC
    ucx: Mapping[str, str] = field(default_factory=dict)
    control_timeout_s: float = 2.0  # of everything but a pull: to meet a peer, to read a slot

    @property
    def plugin_options(self) -> dict[str, str]:
        if self.backend != "UCX":
            return {}
        interface = interface_of(self.host)
        ucx = ({"NET_DEVICES": interface} if interface else {}) | dict(self.ucx)
        return {"engine_config": ",".join(f"{k}={v}" for k, v in ucx.items())} if ucx else {}

    def make_agent(self, *, serves: bool) -> NixlAgent:
        return NixlAgent(self.backend, self.plugin_options, serves=serves)


class NixlTransport:
    """One agent pulls; every region has another that serves it."""

    def __init__(self, options: NixlOptions | None = None) -> None:
        self._options = options or NixlOptions()
        self._agent = self._options.make_agent(serves=False)
        self._memory = _RegisteredMemory(self._agent)
        self._scratch = Scratch()
        self._memory.address_of(self._scratch.buffer)

    def export(self, shape: RegionShape, incarnation: str) -> NixlRegion:
        region = NixlRegion(self._options, shape, incarnation)
        self._memory.address_of(region.slab)  # now, not with the first pull
        return region

    def connect(self, endpoint: str, incarnation: str) -> NixlPeer:
        acquaintance = Acquaintance(endpoint, incarnation, self._options.control_timeout_s)
        try:
            introduction = acquaintance.introduction
            if introduction.backend != self._options.backend:
                raise PullFailed(
                    f"the peer's NIXL backend is {introduction.backend}, here "
                    f"{self._options.backend}"
                )
            self._agent.add_peer(introduction.agent, introduction.metadata)
        except BaseException:
            acquaintance.close()
            raise
        peer = NixlPeer(
            acquaintance, self._agent, self._memory, self._scratch, self._options.control_timeout_s
        )
        try:
            peer.test(incarnation)
        except BaseException:
            peer.close()
            raise
        return peer

    def close(self) -> None:
        self._agent.close()


class NixlRegion:
    """This process's region: one allocation for the life of the process."""

    def __init__(
        self,
        options: NixlOptions,
        shape: RegionShape,
        incarnation: str,
    ) -> None:
        mapped = mmap.mmap(-1, shape.total_bytes)
        populate(mapped)
        buffer = np.frombuffer(mapped, dtype=np.uint8)
        write_header(buffer, shape, incarnation)
        view = RegionView(buffer, shape)
        self._agent = options.make_agent(serves=True)
        self._agent.register(buffer.ctypes.data, buffer.nbytes)
        introduction = Introduction(
            version=VERSION,
            backend=options.backend,
            agent=self._agent.name,
            address=buffer.ctypes.data,
            metadata=self._agent.metadata(),
            num_blocks=shape.num_blocks,
            block_bytes=shape.block_bytes,
            num_slots=shape.num_slots,
        )
        self.slab = view.slab
        self.slots = view.slots
        self._server = IntroductionServer(options.host, incarnation, introduction)
        self.endpoint = self._server.endpoint

    def close(self) -> None:
        """Nobody is let in or served any more."""
        self._server.close()
        self._agent.close()


class NixlPeer:
    def __init__(
        self,
        acquaintance: Acquaintance,
        agent: NixlAgent,
        memory: _RegisteredMemory,
        scratch: Scratch,
        control_timeout_s: float,
    ) -> None:
        self._acquaintance = acquaintance
        self._agent = agent
        self._memory = memory
        self._scratch = scratch
        self._control_timeout_s = control_timeout_s
        met = acquaintance.introduction
        self.shape = RegionShape(met.num_blocks, met.block_bytes, met.num_slots)
        self._name = met.agent
        self._address = met.address
        self._has_failed = False

    @property
    def is_alive(self) -> bool:
        """False as well after a transfer ended in an error: only a new connection helps then."""
        return not self._has_failed and self._acquaintance.is_alive

    def test(self, incarnation: str) -> None:
        """The self-test of a new connection: the header comes over and is the expected one."""
        header = self._read(0, RegionShape.HEADER_BYTES)
        if read_header(header, incarnation) != self.shape:
            raise PullFailed("the peer's region has another shape than it said")

    def read_slot(self, slot: int) -> Slot:
        raw = self._read(self._slot_offset(slot), SLOT_DTYPE.itemsize)
        values = np.frombuffer(raw, dtype=SLOT_DTYPE)[0]
        return Slot(int(values["generation"]), int(values["state"]), int(values[_RELEASED]))

    def pull(
        self, remote: Sequence[int], slab: Slab, local: Sequence[int], timeout_s: float
    ) -> int:
        """Raises ``PullTimedOut`` after ``timeout_s``; the local blocks then stay in danger until
        its ``settled`` is done.
        """
        assert isinstance(slab, np.ndarray)
        check_pull(self.shape, remote, slab, local)
        if not remote:
            return 0
        size = self.shape.block_bytes
        runs = list(contiguous_runs(remote, local))
        here, there = self._memory.address_of(slab), self._address + self.shape.slab_offset
        settled = self._agent.transfer(
            Op.READ,
            self._name,
            _descriptors((here + to * size, count * size) for _, to, count in runs),
            _descriptors((there + source * size, count * size) for source, _, count in runs),
        )
        try:
            self._wait(settled, timeout_s)
        except TimeoutError as error:
            raise PullTimedOut(f"the copy took longer than {timeout_s} s", settled) from error
        return len(remote) * size

    def release(self, slot: int, generation: int) -> None:
        """A release that cannot be delivered is none: the lease then ends by its ttl."""
        offset = self._slot_offset(slot)
        field_offset = SLOT_DTYPE.fields[_RELEASED][1]  # type: ignore[index]
        try:
            # A late release must not undo that of the slot's next lease.
            if generation > self.read_slot(slot).released_generation:
                self._write(offset + field_offset, generation.to_bytes(8, "little"))
        except PullFailed:
            pass

    def close(self) -> None:
        self._acquaintance.close()
        self._agent.remove_peer(self._name)

    # ---- helpers -----------------------------------------------------------------------

    def _slot_offset(self, slot: int) -> int:
        if not 0 <= slot < self.shape.num_slots:
            raise PullFailed(f"lease slot {slot} of {self.shape.num_slots}")
        return RegionShape.HEADER_BYTES + slot * SLOT_DTYPE.itemsize

    def _read(self, offset: int, num_bytes: int) -> bytes:
        with self._scratch.cell() as cell:
            self._move(Op.READ, cell, offset, num_bytes)
            return cell.view[:num_bytes].tobytes()

    def _write(self, offset: int, data: bytes) -> None:
        with self._scratch.cell() as cell:
            cell.view[: len(data)] = np.frombuffer(data, dtype=np.uint8)
            self._move(Op.WRITE, cell, offset, len(data))

    def _move(self, op: Op, cell: Cell, offset: int, num_bytes: int) -> None:
        here = _descriptors([(cell.address, num_bytes)])
        there = _descriptors([(self._address + offset, num_bytes)])
        cell.settled = self._agent.transfer(op, self._name, here, there)
        try:
            self._wait(cell.settled, self._control_timeout_s)
        except TimeoutError as error:
            raise PullFailed(f"no answer within {self._control_timeout_s} s") from error

    def _wait(self, settled: Future[None], timeout_s: float) -> None:
        try:
            settled.result(timeout_s)
        except PullFailed:
            self._has_failed = True
            raise


class _RegisteredMemory:
    """Arrays that NIXL may touch. They are never freed: a late transfer may still write to them."""

    def __init__(self, agent: NixlAgent) -> None:
        self._agent = agent
        self._arrays: list[Bytes] = []
        self._lock = threading.Lock()

    def address_of(self, array: Bytes) -> int:
        """Registers the array when it is seen first; parts of a registered one are covered."""
        assert array.flags.c_contiguous
        start = array.ctypes.data
        with self._lock:
            if not any(_covers(known, start, array.nbytes) for known in self._arrays):
                self._agent.register(start, array.nbytes)
                self._arrays.append(array)
        return start


def _covers(known: Bytes, start: int, num_bytes: int) -> bool:
    first = known.ctypes.data
    return first <= start and start + num_bytes <= first + known.nbytes


def _descriptors(ranges: Iterable[tuple[int, int]]) -> Descriptors:
    return np.array([(address, size, 0) for address, size in ranges], dtype=np.uint64)
