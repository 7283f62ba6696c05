from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tandem_cli.cores import core_parameters


def _cores_of(parameters: dict[str, str], num_instances: int) -> list[int]:
    """The cores the engines take, as the engine model reads the parameters."""
    first, share = int(parameters["first_core"]), int(parameters["cores_per_instance"])
    return list(range(first, first + num_instances * share))


def test_two_cores_go_to_one_engine_each() -> None:
    assert core_parameters(2, 1, 1) == {
        "prefill": {"first_core": "0", "cores_per_instance": "1"},
        "decode": {"first_core": "1", "cores_per_instance": "1"},
    }


def test_without_prefill_decode_gets_all() -> None:
    decode = core_parameters(8, 0, 2)["decode"]
    assert decode == {"first_core": "0", "cores_per_instance": "4"}


def test_more_engines_than_cores_are_not_pinned() -> None:
    unpinned = {"first_core": "-1", "num_threads": "1"}
    assert core_parameters(2, 2, 1) == {"prefill": unpinned, "decode": unpinned}


@given(st.integers(1, 64), st.integers(0, 8), st.integers(1, 8))
def test_no_core_is_shared(num_cores: int, num_prefill: int, num_decode: int) -> None:
    found = core_parameters(num_cores, num_prefill, num_decode)
    if num_prefill + num_decode > num_cores:
        assert found["decode"]["first_core"] == "-1"
        return
    cores = _cores_of(found["prefill"], num_prefill) + _cores_of(found["decode"], num_decode)
    assert len(set(cores)) == len(cores)
    assert set(cores) <= set(range(num_cores))
