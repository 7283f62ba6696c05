"""What NIXL does not do by itself: deadlines, late bytes, peers that freeze, vanish or come back.

Over TCP, within a host and between two; where shared memory is used, the kernel copies from a
frozen process as well.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from exporter_process import pattern
from tandem.errors import ConfigError, PullFailed, PullTimedOut
from tandem.transport.base import Bytes, Peer, RegionShape
from tandem.transport.nixl import NixlOptions, NixlTransport
from transport_exporters import (
    CONTROL_TIMEOUT_S,
    INCARNATION,
    FarExporter,
    NixlExporter,
    NixlTcpExporter,
    needs_nixl,
)
from two_hosts import FAR_HOST, Link

pytestmark = needs_nixl
KIND = "far" if FAR_HOST else "tcp"

SHAPE = RegionShape(num_blocks=32, block_bytes=2 << 20, num_slots=2)
ALL = list(range(SHAPE.num_blocks))
UNTOUCHED = 255
SOON_S = 30.0  # for what must happen, however busy the machine is


@pytest.fixture(scope="module")
def slab() -> Bytes:
    return np.empty((SHAPE.num_blocks, SHAPE.block_bytes), dtype=np.uint8)


@pytest.fixture(params=[FarExporter if FAR_HOST else NixlTcpExporter], ids=[KIND])
def exporter(request: pytest.FixtureRequest, slab: Bytes) -> Iterator[NixlExporter]:
    slab[:] = UNTOUCHED
    exporter: NixlExporter = request.param(SHAPE)
    yield exporter
    if exporter.process.poll() is None:
        exporter.die()


def _assert_whole(slab: Bytes) -> None:
    for block, row in enumerate(slab):
        np.testing.assert_array_equal(row, pattern(block, SHAPE.block_bytes))


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.0002)


class PullInThread:
    """A pull of all blocks; ``error`` is how it ended."""

    def __init__(self, peer: Peer, slab: Bytes, timeout_s: float) -> None:
        self.error: PullFailed | None = None
        self._thread = threading.Thread(target=self._run, args=(peer, slab, timeout_s))
        self._thread.start()

    def _run(self, peer: Peer, slab: Bytes, timeout_s: float) -> None:
        try:
            peer.pull(ALL, slab, ALL, timeout_s)
        except PullFailed as error:
            self.error = error

    def end(self) -> PullFailed | None:
        self._thread.join(SOON_S)
        assert not self._thread.is_alive()
        return self.error


def test_a_frozen_peer_ends_a_pull_in_time_and_its_late_bytes_are_announced(
    exporter: NixlExporter, slab: Bytes
) -> None:
    peer = exporter.transport.connect(exporter.endpoint, INCARNATION)
    exporter.freeze()
    with pytest.raises(PullTimedOut, match="longer than 0.2 s") as raised:
        peer.pull(ALL, slab, ALL, 0.2)
    assert not raised.value.settled.done()
    before = (slab != UNTOUCHED).sum()
    exporter.thaw()
    raised.value.settled.result(SOON_S)
    assert before < slab.size, "something was still to come"
    _assert_whole(slab)
    peer.close()


def test_a_peer_that_was_frozen_for_a_while_serves_again(
    exporter: NixlExporter, slab: Bytes
) -> None:
    peer = exporter.transport.connect(exporter.endpoint, INCARNATION)
    lease = exporter.grant()
    exporter.freeze()
    with pytest.raises(PullFailed, match=f"no answer within {CONTROL_TIMEOUT_S} s"):
        peer.read_slot(lease.slot)
    with pytest.raises(PullFailed, match="does not answer"):
        exporter.transport.connect(exporter.endpoint, INCARNATION)
    exporter.thaw()
    assert peer.read_slot(lease.slot).generation == lease.generation
    assert peer.is_alive
    peer.pull(ALL, slab, ALL, SOON_S)
    _assert_whole(slab)
    peer.close()


def test_a_peer_killed_in_mid_pull_fails_it_for_good(exporter: NixlExporter, slab: Bytes) -> None:
    peer = exporter.transport.connect(exporter.endpoint, INCARNATION)
    pull = PullInThread(peer, slab, SOON_S)
    _wait_until(lambda: slab[0, 0] != UNTOUCHED or slab[-1, -1] != UNTOUCHED)
    exporter.freeze()  # so that it cannot finish meanwhile
    exporter.die()
    error = pull.end()
    assert error is not None and not isinstance(error, PullTimedOut)
    assert not peer.is_alive
    with pytest.raises(PullFailed):
        peer.pull([0], slab, [0], SOON_S)
    peer.close()


def test_a_restarted_peer_is_met_anew(exporter: NixlExporter, slab: Bytes) -> None:
    old = exporter.transport.connect(exporter.endpoint, INCARNATION)
    exporter.process.kill()
    exporter.process.wait(SOON_S)
    again = "f" * 16
    successor = type(exporter)(SHAPE, again)
    try:
        assert not old.is_alive
        with pytest.raises(PullFailed):
            old.pull([0], slab, [0], SOON_S)
        with pytest.raises(PullFailed, match="gone|another incarnation"):
            exporter.transport.connect(exporter.endpoint, INCARNATION)
        with pytest.raises(PullFailed, match="another incarnation"):
            exporter.transport.connect(successor.endpoint, INCARNATION)
        new = exporter.transport.connect(successor.endpoint, again)
        old.close()
        new.pull(ALL, slab, ALL, SOON_S)
        _assert_whole(slab)
        new.close()
    finally:
        successor.die()


if FAR_HOST:  # see test_transport_two_hosts.py

    def test_a_link_cut_in_mid_pull_ends_it_in_time_and_the_rest_lands_later(
        exporter: NixlExporter, slab: Bytes
    ) -> None:
        peer = exporter.transport.connect(exporter.endpoint, INCARNATION)
        pull = PullInThread(peer, slab, 0.5)
        _wait_until(lambda: bool((slab[:, 0] != UNTOUCHED).any()))
        link = Link()
        link.cut()
        error = pull.end()
        assert isinstance(error, PullTimedOut) and not error.settled.done()
        assert (slab[:, -1] == UNTOUCHED).any(), "the cut came in the middle"
        with pytest.raises(PullFailed, match="no answer"):
            peer.read_slot(0)
        link.join()
        error.settled.result(SOON_S)
        _assert_whole(slab)
        peer.close()


def test_a_connection_closed_while_bytes_are_under_way_waits_for_them(
    exporter: NixlExporter, slab: Bytes
) -> None:
    peer = exporter.transport.connect(exporter.endpoint, INCARNATION)
    exporter.freeze()
    with pytest.raises(PullTimedOut) as raised:
        peer.pull(ALL, slab, ALL, 0.05)
    peer.close()
    with pytest.raises(PullFailed, match="closed"):
        peer.pull([0], slab, [0], SOON_S)
    exporter.thaw()
    with pytest.raises(PullFailed, match="not come to its end"):
        exporter.transport.connect(exporter.endpoint, INCARNATION)
    raised.value.settled.result(SOON_S)
    _assert_whole(slab)
    again = exporter.transport.connect(exporter.endpoint, INCARNATION)
    assert again.pull([3], slab, [0], SOON_S) == SHAPE.block_bytes
    again.close()


def test_a_backend_that_is_not_there_stops_the_start() -> None:
    with pytest.raises(ConfigError, match="no backend NONE here"):
        NixlTransport(NixlOptions(backend="NONE"))
