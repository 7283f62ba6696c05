"""What clients of an LLM in Triton rely on, whatever the backend: see docs/conformance.md.

``pytest tests/conformance --url http://HOST:8000 --grpc-url HOST:8001 --llm MODEL``
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2

from endpoint import STREAMS, Endpoint
from triton_calls import PROTOCOLS, TIMEOUT_S, Answer, infer_request, tensors_of

SHORT = "The capital of France is"
LONG = "It was the best of times, it was the worst of times. " * 6
PROMPTS = {"short": SHORT, "long": LONG, "unicode": "日本語 🎉 naïve: ", "lines": "a = [\n\t1,\n"}
NUM_CONCURRENT = 8
ENDLESS: dict[str, Any] = {"max_tokens": 300, "ignore_eos": True}

every_protocol = pytest.mark.parametrize("protocol", PROTOCOLS)
every_stream = pytest.mark.parametrize("protocol", STREAMS)


# ---- the server ------------------------------------------------------------------------------


def test_health(endpoint: Endpoint) -> None:
    for path in ("health/live", "health/ready", f"models/{endpoint.model}/ready"):
        assert endpoint.get(path).status_code == 200, path
    assert endpoint.get("models/no-such-model/ready").status_code >= 400


def test_metadata_over_http_and_grpc(endpoint: Endpoint) -> None:
    assert endpoint.has("inputs", "text_input") and endpoint.has("outputs", "text_output")
    with endpoint.stub() as stub:
        found = stub.ModelMetadata(service_pb2.ModelMetadataRequest(name=endpoint.model))
    for kind in ("inputs", "outputs"):
        names = [tensor.name for tensor in getattr(found, kind)]
        assert names == [tensor["name"] for tensor in endpoint.metadata[kind]]


# ---- answers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_every_protocol_gives_the_same_text(endpoint: Endpoint, prompt: str) -> None:
    protocols = [p for p in PROTOCOLS if p != "grpc" or endpoint.grpc_address]
    texts = {protocol: endpoint.good(protocol, prompt).text for protocol in protocols}
    assert len(set(texts.values())) == 1, texts
    assert texts["generate"]


@every_stream
def test_a_stream_comes_in_pieces(endpoint: Endpoint, protocol: str) -> None:
    answer = endpoint.good(protocol, SHORT, ignore_eos=True)
    assert sum(bool(response["text_output"][0]) for response in answer.responses) > 1
    assert answer.text == endpoint.good("generate", SHORT, ignore_eos=True).text


def test_server_sent_events(endpoint: Endpoint) -> None:
    path = f"{endpoint.http_url}/v2/models/{endpoint.model}/generate_stream"
    inputs = endpoint.inputs(SHORT, True, {})
    reply = httpx.post(path, json=inputs, timeout=TIMEOUT_S, verify=False)
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = reply.text.split("\n\n")
    assert events.pop() == ""
    for event in events:
        assert event.startswith("data: ")
        assert "text_output" in json.loads(event.removeprefix("data: "))


@every_protocol
@pytest.mark.parametrize("count", [1, 7])
def test_max_tokens_and_what_was_used(endpoint: Endpoint, protocol: str, count: int) -> None:
    for name in ("finish_reason", "num_input_tokens", "num_output_tokens"):
        endpoint.require_output(name)
    answer = endpoint.good(protocol, SHORT, max_tokens=count, ignore_eos=True)
    assert num_output_tokens(answer) == count
    assert answer.final("finish_reason") == "length"
    longer = endpoint.good(protocol, SHORT * 2, max_tokens=count, ignore_eos=True)
    assert 0 < answer.final("num_input_tokens") < longer.final("num_input_tokens")


@every_protocol
def test_a_stop_string_ends_the_text_before_it(endpoint: Endpoint, protocol: str) -> None:
    whole = endpoint.good("generate", SHORT, ignore_eos=True).text
    starts = [i for i in range(len(whole) - 2) if whole[i : i + 2].isascii()]
    if not starts:
        pytest.skip("this model answers without two ASCII letters in a row")
    start = starts[len(starts) // 2]
    stop = whole[start : start + 2]
    answer = endpoint.good(protocol, SHORT, stop=[stop], ignore_eos=True)
    assert answer.text == whole[: whole.index(stop)]
    if endpoint.has("outputs", "finish_reason"):
        assert answer.final("finish_reason") == "stop"


@every_protocol
def test_min_tokens(endpoint: Endpoint, protocol: str) -> None:
    endpoint.require_output("num_output_tokens")
    answer = endpoint.good(protocol, SHORT, min_tokens=24, temperature=1.0, seed=5)
    assert num_output_tokens(answer) == 24


@every_protocol
def test_a_seed_repeats_the_sample(endpoint: Endpoint, protocol: str) -> None:
    def sample(seed: int) -> str:
        return endpoint.good(protocol, SHORT, temperature=1.0, seed=seed, ignore_eos=True).text

    samples = [sample(seed) for seed in range(4)]
    assert len(set(samples)) > 1
    assert [sample(seed) for seed in range(4)] == samples


def test_top_k_1_is_greedy(endpoint: Endpoint) -> None:
    greedy = endpoint.good("generate", SHORT).text
    assert endpoint.good("generate", SHORT, temperature=1.0, top_k=1).text == greedy


def num_output_tokens(answer: Answer) -> int:
    """Backends tell it at the end, or of each response."""
    return sum(count for r in answer.responses for count in r.get("num_output_tokens", []))


# ---- many at once ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lone(endpoint: Endpoint) -> dict[str, str]:
    """Prompt → its answer when nothing else runs."""
    prompts = [f"{index}. {(SHORT, LONG)[index % 2]}" for index in range(NUM_CONCURRENT)]
    return {prompt: endpoint.good("generate", prompt).text for prompt in prompts}


def at_once(endpoint: Endpoint, protocol: str, prompts: Iterable[str]) -> list[str]:
    with ThreadPoolExecutor(NUM_CONCURRENT) as threads:
        return list(threads.map(lambda prompt: endpoint.good(protocol, prompt).text, prompts))


@every_protocol
def test_nobodys_text_depends_on_the_others(
    endpoint: Endpoint, lone: dict[str, str], protocol: str
) -> None:
    assert at_once(endpoint, protocol, lone) == list(lone.values())


def test_requests_of_one_grpc_stream_keep_their_ids_and_end_once(
    endpoint: Endpoint, lone: dict[str, str]
) -> None:
    requests = [(prompt, endpoint.inputs(prompt, True, {})) for prompt in lone]
    pieces = list(endpoint.pieces(*requests))
    for prompt, text in lone.items():
        its = [piece for piece in pieces if piece.request_id == prompt]
        assert "".join(piece.text for piece in its) == text
        assert [piece.is_final for piece in its] == [False] * (len(its) - 1) + [True]


def test_a_short_request_need_not_wait_for_a_long_one(endpoint: Endpoint) -> None:
    """Some try in five: the long one of a fast model may just end on a busy machine."""
    for _ in range(5):
        has_begun, has_ended = threading.Event(), threading.Event()

        def read(has_begun: threading.Event = has_begun) -> None:
            for _ in endpoint.pieces(("long", endpoint.inputs(SHORT, True, ENDLESS))):
                has_begun.set()

        with endpoint.stub(), ThreadPoolExecutor(1) as thread:
            running = thread.submit(read)
            running.add_done_callback(lambda _, has_ended=has_ended: has_ended.set())
            assert has_begun.wait(TIMEOUT_S)
            endpoint.good("generate", SHORT, max_tokens=1)
            was_running = not has_ended.is_set()
            running.result()
        if was_running:
            return
    raise AssertionError("short requests wait for long ones")


# ---- clients that leave ----------------------------------------------------------------------


def test_cancelled_grpc_streams_disturb_nobody(endpoint: Endpoint, lone: dict[str, str]) -> None:
    inputs = endpoint.inputs(SHORT, True, ENDLESS)
    with endpoint.stub() as stub:
        for _ in range(2 * NUM_CONCURRENT):
            message = infer_request(endpoint.model, tensors_of(inputs))
            call = stub.ModelStreamInfer(iter([message]), timeout=TIMEOUT_S)
            next(call)
            call.cancel()
            with pytest.raises(grpc.RpcError):
                list(call)
    assert at_once(endpoint, "grpc", lone) == list(lone.values())


def test_closed_http_streams_disturb_nobody(endpoint: Endpoint, lone: dict[str, str]) -> None:
    path = f"{endpoint.http_url}/v2/models/{endpoint.model}/generate_stream"
    inputs = endpoint.inputs(SHORT, True, ENDLESS)
    for _ in range(2 * NUM_CONCURRENT):
        with httpx.stream("POST", path, json=inputs, timeout=TIMEOUT_S, verify=False) as reply:
            next(reply.iter_bytes())
    assert at_once(endpoint, "generate_stream", lone) == list(lone.values())


# ---- bad requests ----------------------------------------------------------------------------

BAD_SAMPLING: dict[str, dict[str, Any]] = {
    "max_tokens": {"max_tokens": -1},
    "temperature": {"temperature": -1.0},
    "top_p": {"top_p": 2.0},
    "top_k": {"top_k": -5},
    "unknown": {"no_such_parameter": 1},
    "text for a number": {"max_tokens": "many"},
}


@every_protocol
@pytest.mark.parametrize("sampling", BAD_SAMPLING.values(), ids=BAD_SAMPLING)
def test_a_bad_sampling_parameter_is_an_error(
    endpoint: Endpoint, protocol: str, sampling: dict[str, Any]
) -> None:
    assert_refused(endpoint, protocol, endpoint.inputs(SHORT, protocol in STREAMS, sampling))


@every_protocol
@pytest.mark.parametrize("what", ["json", "prompt", "length"])
def test_a_request_that_cannot_be_served_is_an_error(
    endpoint: Endpoint, protocol: str, what: str
) -> None:
    inputs = endpoint.inputs(SHORT, protocol in STREAMS, {})
    if what == "json":
        inputs["sampling_parameters"] = '{"max_tokens": '
    elif what == "prompt":
        del inputs["text_input"]
    else:
        inputs["text_input"] = "word " * 300_000
    assert_refused(endpoint, protocol, inputs)


def assert_refused(endpoint: Endpoint, protocol: str, inputs: dict[str, Any]) -> None:
    """With words, no traceback; and the next request is served."""
    answer = endpoint.send(protocol, inputs)
    assert answer.error, answer
    assert "Traceback" not in answer.error
    assert endpoint.good("generate", SHORT, max_tokens=1).responses


def test_a_unary_grpc_call_is_answered(endpoint: Endpoint) -> None:
    """By the one response, or by the error that a decoupled model needs a stream."""
    message = infer_request(endpoint.model, tensors_of(endpoint.inputs(SHORT, False, {})))
    with endpoint.stub() as stub:
        try:
            assert stub.ModelInfer(message, timeout=TIMEOUT_S).outputs
        except grpc.RpcError as error:
            assert error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
