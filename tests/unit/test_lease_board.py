import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.errors import FenceBroken
from tandem.kv.lease_board import (
    SLOT_DTYPE,
    Lease,
    LeaseBoard,
    LeaseState,
    Slot,
    check_fence,
)

TTL_S = 10.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Exporter:
    """A board, and what a puller sees and does through the shared memory."""

    def __init__(self, num_slots: int) -> None:
        self.clock = Clock()
        self.memory = np.zeros(num_slots, dtype=SLOT_DTYPE)
        self.board = LeaseBoard(self.memory, TTL_S, self.clock)

    def read(self, lease: Lease) -> Slot:
        return Slot(*(int(self.memory[lease.slot][name]) for name in Slot._fields))

    def check(self, lease: Lease) -> None:
        check_fence(self.read(lease), lease.generation)

    def release(self, lease: Lease) -> None:
        self.memory[lease.slot]["released_generation"] = lease.generation

    def passes(self, lease: Lease) -> bool:
        try:
            self.check(lease)
        except FenceBroken:
            return False
        return True


def test_a_granted_lease_passes_the_fence() -> None:
    exporter = Exporter(2)
    lease = exporter.board.grant()
    exporter.check(lease)
    assert exporter.read(lease) == Slot(lease.generation, LeaseState.LEASED, 0)
    assert exporter.board.num_leases == 1
    assert exporter.board.collect() == []


def test_a_lease_expires_when_its_ttl_has_passed() -> None:
    exporter = Exporter(1)
    lease = exporter.board.grant()
    exporter.clock.now_s += TTL_S - 0.001
    assert exporter.board.collect() == []
    exporter.check(lease)
    exporter.clock.now_s += 0.001
    assert exporter.board.collect() == [(lease, False)]
    with pytest.raises(FenceBroken, match="generation"):
        exporter.check(lease)
    assert exporter.board.num_leases == 0
    assert exporter.board.collect() == []


def test_a_renewed_lease_lives_another_ttl_from_now() -> None:
    exporter = Exporter(1)
    lease = exporter.board.grant()
    exporter.clock.now_s += 9
    exporter.board.renew(lease)
    exporter.clock.now_s += 9
    assert exporter.board.collect() == []
    exporter.clock.now_s += 1
    assert exporter.board.collect() == [(lease, False)]


def test_a_lease_that_ended_stays_ended() -> None:
    exporter = Exporter(1)
    lease = exporter.board.grant()
    assert exporter.board.revoke(lease)
    exporter.board.renew(lease)
    assert not exporter.board.revoke(lease)
    assert exporter.board.num_leases == 0
    assert not exporter.passes(lease)


def test_a_release_is_collected_once_and_at_once() -> None:
    exporter = Exporter(2)
    lease, other = exporter.board.grant(), exporter.board.grant()
    exporter.release(lease)
    assert exporter.board.collect() == [(lease, True)]
    assert exporter.board.collect() == []
    exporter.check(other)


def test_a_released_lease_counts_as_released_even_after_its_ttl() -> None:
    exporter = Exporter(1)
    lease = exporter.board.grant()
    exporter.release(lease)
    exporter.clock.now_s += 2 * TTL_S
    assert exporter.board.collect() == [(lease, True)]


def test_a_late_release_frees_nothing_of_the_slots_next_lease() -> None:
    exporter = Exporter(1)
    old = exporter.board.grant()
    exporter.board.revoke(old)
    new = exporter.board.grant()
    assert new.slot == old.slot
    exporter.release(old)
    assert exporter.board.collect() == []
    exporter.check(new)


def test_the_generation_moves_when_a_lease_ends_and_when_its_slot_is_granted_again() -> None:
    exporter = Exporter(1)
    first = exporter.board.grant()
    exporter.board.revoke(first)
    assert exporter.read(first).generation > first.generation
    assert exporter.read(first).state == LeaseState.FREE
    second = exporter.board.grant()
    assert second.generation > first.generation + 1


def test_a_board_says_when_it_is_full() -> None:
    exporter = Exporter(2)
    leases = [exporter.board.grant(), exporter.board.grant()]
    assert leases[0].slot != leases[1].slot
    assert not exporter.board.can_grant()
    exporter.board.revoke(leases[0])
    assert exporter.board.can_grant()


def test_wait_for_leases_returns_at_once_when_there_is_one() -> None:
    exporter = Exporter(1)
    assert not exporter.board.wait_for_leases(timeout_s=0)
    exporter.board.grant()
    assert exporter.board.wait_for_leases(timeout_s=0)


@pytest.mark.parametrize(
    ("slot", "problem"),
    [
        (Slot(8, LeaseState.LEASED, 0), "generation is 8"),
        (Slot(6, LeaseState.LEASED, 0), "generation is 6"),
        (Slot(7, LeaseState.FREE, 0), "has ended"),
        (Slot(7, 255, 0), "has ended"),
        (Slot(7, LeaseState.LEASED, 7), "consumed"),
    ],
)
def test_the_fence_breaks(slot: Slot, problem: str) -> None:
    with pytest.raises(FenceBroken, match=problem):
        check_fence(slot, 7)


def test_the_release_of_an_earlier_generation_breaks_no_fence() -> None:
    check_fence(Slot(7, LeaseState.LEASED, 5), 7)


class LeaseMachine(RuleBasedStateMachine):
    """An exporter and any number of pullers that hold leases of any age.

    The model: which leases live, until when, and which have been released.
    """

    def __init__(self) -> None:
        super().__init__()
        self.exporter = Exporter(3)
        self.deadlines: dict[Lease, float] = {}
        self.released: set[Lease] = set()
        self.seen: list[Lease] = []

    def _pick(self, data: st.DataObject) -> Lease:
        return data.draw(st.sampled_from(self.seen))

    @precondition(lambda self: self.exporter.board.can_grant())
    @rule()
    def grant(self) -> None:
        lease = self.exporter.board.grant()
        assert lease not in self.seen
        assert lease.slot not in {live.slot for live in self.deadlines}
        self.seen.append(lease)
        self.deadlines[lease] = self.exporter.clock.now_s + TTL_S

    @precondition(lambda self: self.seen)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        lease = self._pick(data)
        self.exporter.board.renew(lease)
        if lease in self.deadlines:
            self.deadlines[lease] = self.exporter.clock.now_s + TTL_S

    @precondition(lambda self: self.seen)
    @rule(data=st.data())
    def revoke(self, data: st.DataObject) -> None:
        lease = self._pick(data)
        assert self.exporter.board.revoke(lease) == (lease in self.deadlines)
        self.deadlines.pop(lease, None)

    @precondition(lambda self: self.seen)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Only a puller whose fence just held releases, but it may come to it late."""
        lease = self._pick(data)
        self.exporter.release(lease)
        # A late release overwrites that of the slot's present lease, which then only expires.
        self.released = {other for other in self.released if other.slot != lease.slot}
        self.released.add(lease)

    @rule(seconds=st.sampled_from([0.0, 1.0, TTL_S / 2, TTL_S]))
    def time_passes(self, seconds: float) -> None:
        self.exporter.clock.now_s += seconds

    @rule()
    def collect(self) -> None:
        now_s = self.exporter.clock.now_s
        expected = {
            (lease, lease in self.released)
            for lease, deadline in self.deadlines.items()
            if lease in self.released or now_s >= deadline
        }
        assert set(self.exporter.board.collect()) == expected
        for lease, _ in expected:
            del self.deadlines[lease]

    @invariant()
    def the_fence_holds_only_for_live_unreleased_leases(self) -> None:
        for lease in self.seen:
            lives = lease in self.deadlines and lease not in self.released
            assert self.exporter.passes(lease) == lives

    @invariant()
    def the_count_is_right(self) -> None:
        assert self.exporter.board.num_leases == len(self.deadlines)
        assert self.exporter.board.can_grant() == (len(self.deadlines) < 3)


TestLeaseMachine = LeaseMachine.TestCase
LeaseMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
