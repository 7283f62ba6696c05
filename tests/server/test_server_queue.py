"""What a request says about its time (timeout, priority) and about sharing (cache_salt)."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from oracle import random_prompt
from running_server import held_blocks, metric, wait_until
from tandem_cli.server import TandemServer
from triton_calls import PROTOCOLS, Answer, ask, infer_request, stream_infer, tensors_of

BLOCK_SIZE = 16


def fresh_prompt(length: int) -> list[int]:
    return random_prompt(length, 270, seed=time.monotonic_ns())


def timings(answer: Answer) -> dict[str, Any]:
    assert answer.error is None
    return dict(json.loads(answer.final("timings")))


# ---- cache_salt ------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "length"), [("local", 100), ("remote", 200)])
def test_the_prefix_cache_is_shared_under_one_salt_only(
    tiny_server: TandemServer, path: str, length: int
) -> None:
    prompt, tail = fresh_prompt(length), fresh_prompt(length // 2)
    for salt, ids, num_cached in [
        ("a", prompt, 0),
        ("b", prompt, 0),
        (None, prompt, 0),
        ("a", prompt, (length - 1) // BLOCK_SIZE * BLOCK_SIZE),  # all but the last token's block
        (None, prompt, (length - 1) // BLOCK_SIZE * BLOCK_SIZE),
        ("b", prompt[: length // 2] + tail, length // 2 // BLOCK_SIZE * BLOCK_SIZE),
        ("c", prompt[: length // 2] + tail, 0),
    ]:
        inputs = {"input_ids": ids, "max_tokens": 2} | ({"cache_salt": salt} if salt else {})
        found = timings(ask(tiny_server, "grpc", inputs))
        assert (found["cached_tokens"], salt) == (num_cached, salt)
        assert num_cached or found["path"] == path


def test_the_ensemble_hands_salt_and_timeout_on(tiny_server: TandemServer) -> None:
    text = " ".join(map(str, fresh_prompt(30)))
    for salt, is_cached in [("a", False), ("b", False), ("a", True)]:
        inputs = {"text_input": text, "cache_salt": salt, "max_tokens": 2, "timeout": 60_000_000}
        answer = ask(tiny_server, "generate", inputs, model="ensemble")
        assert (timings(answer)["cached_tokens"] > 0) == is_cached
    answer = ask(tiny_server, "generate", inputs | {"timeout": 1}, model="ensemble")
    assert answer.error is not None and "timeout of 1 µs" in answer.error


# ---- timeout ---------------------------------------------------------------------------------


@pytest.fixture
def endless(tiny_server: TandemServer) -> dict[str, Any]:
    return {"input_ids": fresh_prompt(20), "max_tokens": 480, "ignore_eos": True}


def assert_ended_in_time(server: TandemServer, answer: Answer) -> None:
    assert answer.error is None
    assert answer.final("finish_reason") == "timeout"
    assert 1 <= answer.final("num_output_tokens") < 480
    wait_until(lambda: held_blocks(server) == 0, 1.5)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_timeout_ends_the_output(
    tiny_server: TandemServer, endless: dict[str, Any], protocol: str
) -> None:
    answer = ask(tiny_server, protocol, endless | {"timeout": 200_000})
    assert_ended_in_time(tiny_server, answer)


def test_tritons_own_timeout_is_the_same(
    tiny_server: TandemServer, endless: dict[str, Any]
) -> None:
    """What ``timeout=`` of tritonclient sends."""
    request = infer_request("llm", tensors_of(endless), {"timeout": 200_000})
    assert_ended_in_time(tiny_server, stream_infer(tiny_server, request))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_expires_before_its_first_token_is_refused(
    tiny_server: TandemServer, endless: dict[str, Any], protocol: str
) -> None:
    num_placed = metric(tiny_server, "tandem_path_total")
    refused = {"name": "tandem_requests_total", "outcome": "UNAVAILABLE"}
    num_refused = metric(tiny_server, **refused)
    answer = ask(tiny_server, protocol, endless | {"timeout": 1})
    assert answer.responses == []
    assert answer.error is not None
    assert "[UNAVAILABLE] no token within its timeout of 1 µs" in answer.error
    wait_until(lambda: metric(tiny_server, **refused) == num_refused + 1)
    assert metric(tiny_server, "tandem_path_total") == num_placed, "no engine heard of it"


def test_priorities_are_taken(tiny_server: TandemServer, endless: dict[str, Any]) -> None:
    for priority in (-100, 0, 7):
        answer = ask(tiny_server, "grpc", endless | {"max_tokens": 2, "priority": priority})
        assert answer.final("finish_reason") == "length"
