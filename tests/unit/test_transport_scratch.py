from concurrent.futures import Future

import pytest

from tandem.errors import PullFailed
from tandem.transport.scratch import Scratch


def test_a_cell_comes_back_only_when_nothing_can_land_in_it() -> None:
    scratch = Scratch(num_cells=2)
    under_way: Future[None] = Future()
    with scratch.cell() as given_up:
        given_up.settled = under_way
    with scratch.cell() as other:
        assert other.address != given_up.address
        with pytest.raises(PullFailed, match="not come to their end"), scratch.cell():
            raise AssertionError
    under_way.set_exception(PullFailed("the peer died"))
    with scratch.cell() as first, scratch.cell() as second:
        assert {first.address, second.address} == {given_up.address, other.address}
        assert first.settled is second.settled is None


def test_cells_do_not_overlap() -> None:
    scratch = Scratch(num_cells=2)
    with scratch.cell() as first, scratch.cell() as second:
        first.view[:] = 1
        second.view[:] = 2
        assert (first.view == 1).all()
        assert first.address == first.view.ctypes.data
