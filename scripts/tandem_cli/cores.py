"""Which cores the engines of one machine get."""

from __future__ import annotations


def core_parameters(num_cores: int, num_prefill: int, num_decode: int) -> dict[str, dict[str, str]]:
    """``{model: parameters}`` so that no two engines share a core, if there are enough.

    ``first_core`` counts the cores this process may use, prefill instances first. With more
    engines than cores none is pinned and each computes with one thread.
    """
    num_engines = num_prefill + num_decode
    if num_engines > num_cores:
        unpinned = {"first_core": "-1", "num_threads": "1"}
        return {"prefill": unpinned, "decode": unpinned}
    share = num_cores // num_engines
    return {
        "prefill": {"first_core": "0", "cores_per_instance": str(share)},
        "decode": {"first_core": str(num_prefill * share), "cores_per_instance": str(share)},
    }
