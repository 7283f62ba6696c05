"""Every input and output of ``llm``, with its effect, over every protocol of the real server."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from oracle import Oracle, random_prompt
from tandem.metrics import ENGINE_FAMILIES, ORCHESTRATOR_FAMILIES
from tandem_cli.server import TandemServer
from triton_calls import PROTOCOLS, Answer, ask, infer_request, post, stream_infer, tensors_of

TEXT = "hello the world"
INPUTS = {
    "text_input": ("BYTES", [1]),
    "messages": ("BYTES", [1]),
    "input_ids": ("INT32", [-1]),
    "stream": ("BOOL", [1]),
    "max_tokens": ("INT32", [1]),
    "min_tokens": ("INT32", [1]),
    "temperature": ("FP32", [1]),
    "top_p": ("FP32", [1]),
    "top_k": ("INT32", [1]),
    "min_p": ("FP32", [1]),
    "repetition_penalty": ("FP32", [1]),
    "presence_penalty": ("FP32", [1]),
    "frequency_penalty": ("FP32", [1]),
    "seed": ("INT64", [1]),
    "stop": ("BYTES", [-1]),
    "stop_token_ids": ("INT32", [-1]),
    "ignore_eos": ("BOOL", [1]),
    "logprobs": ("INT32", [1]),
    "n": ("INT32", [1]),
    "priority": ("INT32", [1]),
    "timeout": ("INT64", [1]),
    "cache_salt": ("BYTES", [1]),
    "sampling_parameters": ("BYTES", [1]),
    "exclude_input_in_output": ("BOOL", [1]),
    "return_finish_reason": ("BOOL", [1]),
    "return_num_input_tokens": ("BOOL", [1]),
    "return_num_output_tokens": ("BOOL", [1]),
    "return_timings": ("BOOL", [1]),
    "return_output_ids": ("BOOL", [1]),
}
OUTPUTS = {
    "text_output": ("BYTES", [1]),
    "finish_reason": ("BYTES", [1]),
    "num_input_tokens": ("INT32", [1]),
    "num_output_tokens": ("INT32", [1]),
    "logprobs": ("FP32", [-1]),
    "output_ids": ("INT32", [-1]),
    "timings": ("BYTES", [1]),
}

Ask = Callable[..., Answer]


@pytest.fixture(scope="module")
def oracle(tiny_model_dir: Callable[..., Path]) -> Oracle:
    return Oracle(tiny_model_dir("llama"))


@pytest.fixture(params=PROTOCOLS)
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def call(tiny_server: TandemServer, protocol: str) -> Ask:
    """Sends inputs as they are; the answer may be an error."""
    return lambda **inputs: ask(tiny_server, protocol, inputs)


@pytest.fixture
def good(call: Ask) -> Ask:
    """An answer with its token ids, at most 12 unless told otherwise."""

    def send(**inputs: Any) -> Answer:
        if not {"text_input", "messages"} & inputs.keys():
            inputs = {"input_ids": prompt()} | inputs
        answer = call(**({"max_tokens": 12, "return_output_ids": True} | inputs))
        assert answer.error is None
        return answer

    return send


def prompt(seed: int = 0, length: int = 20) -> list[int]:
    return random_prompt(length, 280, seed)


# ---- inputs, each with what it does --------------------------------------------------------


def test_text_input(good: Ask, oracle: Oracle) -> None:
    answer = good(text_input=TEXT)
    ids = oracle.tokenizer.encode(TEXT)
    assert answer.final("num_input_tokens") == len(ids)
    assert answer.output_ids == oracle.greedy(ids, 12)
    assert answer.text == oracle.text(answer.output_ids, answer.final("finish_reason"))


def test_messages(good: Ask, oracle: Oracle) -> None:
    messages = [{"role": "system", "content": "hello"}, {"role": "user", "content": "the world"}]
    chat = oracle.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    ids = oracle.tokenizer.encode(chat, add_special_tokens=False)
    answer = good(messages=json.dumps(messages))
    assert answer.final("num_input_tokens") == len(ids)
    assert answer.output_ids == oracle.greedy(ids, 12)


def test_messages_with_text_parts(good: Ask) -> None:
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "world"}]
    in_parts = good(messages=json.dumps([{"role": "user", "content": parts}]))
    plain = good(messages=json.dumps([{"role": "user", "content": "hello\nworld"}]))
    assert in_parts.output_ids == plain.output_ids


def test_input_ids(good: Ask, oracle: Oracle) -> None:
    answer = good(input_ids=prompt(1))
    assert answer.final("num_input_tokens") == 20
    assert answer.output_ids == oracle.greedy(prompt(1), 12)


def test_stream(good: Ask, protocol: str, oracle: Oracle) -> None:
    whole = good(stream=False)
    assert len(whole.responses) == 1
    if protocol != "generate":
        streamed = good(stream=True)
        assert len(streamed.responses) == len(streamed.output_ids) == 12
        assert streamed.text == whole.text
        assert streamed.output_ids == whole.output_ids


def test_max_tokens(good: Ask, oracle: Oracle) -> None:
    answer = good(max_tokens=5)
    assert answer.output_ids == oracle.greedy(prompt(), 5)
    assert answer.final("num_output_tokens") == 5
    assert answer.final("finish_reason") == "length"


def test_min_tokens(good: Ask, oracle: Oracle) -> None:
    ids = oracle.prompt_whose_first_token(lambda token: token == oracle.eos)
    assert good(input_ids=ids).output_ids == [oracle.eos]
    answer = good(input_ids=ids, min_tokens=3)
    assert answer.output_ids == oracle.generate(ids, 12, min_new_tokens=3)
    assert len(answer.output_ids) > 3


def test_ignore_eos(good: Ask, oracle: Oracle) -> None:
    ids = oracle.prompt_whose_first_token(lambda token: token == oracle.eos)
    answer = good(input_ids=ids, ignore_eos=True)
    assert answer.output_ids == oracle.generate(ids, 12, eos_token_id=None)
    assert answer.output_ids[0] == oracle.eos
    assert answer.final("finish_reason") == "length"


def test_temperature_and_seed(good: Ask, oracle: Oracle) -> None:
    greedy = oracle.greedy(prompt(), 12)
    assert good(temperature=0.0).output_ids == greedy
    sampled = good(temperature=1.0, seed=7).output_ids
    assert sampled != greedy
    assert good(temperature=1.0, seed=7).output_ids == sampled
    assert good(temperature=1.0, seed=8).output_ids != sampled


def test_no_seed_is_a_new_one_each_time(good: Ask) -> None:
    assert good(temperature=2.0).output_ids != good(temperature=2.0).output_ids


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_filters_leave_the_likeliest(good: Ask, oracle: Oracle, narrow: dict[str, Any]) -> None:
    answer = good(temperature=1.0, seed=7, **narrow)
    assert answer.output_ids == oracle.greedy(prompt(), 12)


def test_repetition_penalty(good: Ask, oracle: Oracle) -> None:
    expected = oracle.generate(prompt(), 12, repetition_penalty=1.7)
    assert expected != oracle.greedy(prompt(), 12)
    assert good(repetition_penalty=1.7).output_ids == expected


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_penalties_on_the_output(good: Ask, oracle: Oracle, penalty: str) -> None:
    ids = prompt_with_repeats(oracle)
    plain = good(input_ids=ids, max_tokens=40).output_ids
    answer = good(input_ids=ids, max_tokens=40, **{penalty: 2.0}).output_ids
    assert plain == oracle.greedy(ids, 40)
    assert len(set(answer)) > len(set(plain))
    encouraged = good(input_ids=ids, max_tokens=40, **{penalty: -2.0}).output_ids
    assert len(set(encouraged)) < len(set(answer))


def prompt_with_repeats(oracle: Oracle) -> list[int]:
    def num_distinct(seed: int) -> int:
        ids = oracle.greedy(prompt(seed), 40)
        return len(set(ids)) if len(ids) == 40 else 40

    return prompt(min(range(8), key=num_distinct))


def test_stop(good: Ask, oracle: Oracle) -> None:
    text = oracle.text(oracle.greedy(prompt(), 12))
    position = next(i for i, char in enumerate(text) if i > 0 and char.isascii())
    answer = good(stop=["never seen", text[position]])
    assert answer.text == text[: text.index(text[position])]
    assert answer.final("finish_reason") == "stop"


def test_stop_token_ids(good: Ask, oracle: Oracle) -> None:
    greedy = oracle.greedy(prompt(), 12)
    stop = greedy[5]
    expected = greedy[: greedy.index(stop) + 1]
    answer = good(stop_token_ids=[stop])
    assert answer.output_ids == expected
    assert answer.text == oracle.text(expected, "stop")
    assert answer.final("finish_reason") == "stop"


def test_logprobs(good: Ask, oracle: Oracle) -> None:
    answer = good(logprobs=1)
    assert len(answer.logprobs) == 12
    assert answer.logprobs == pytest.approx(oracle.logprobs(prompt(), answer.output_ids), abs=1e-4)
    assert "logprobs" not in good(logprobs=0).responses[-1]


def test_logprobs_are_those_before_temperature_and_penalties(good: Ask, oracle: Oracle) -> None:
    answer = good(logprobs=1, temperature=1.5, seed=3, repetition_penalty=1.3)
    assert answer.logprobs == pytest.approx(oracle.logprobs(prompt(), answer.output_ids), abs=1e-4)


def test_n(good: Ask) -> None:
    assert good(n=1).output_ids == good().output_ids


def test_sampling_parameters(good: Ask, call: Ask) -> None:
    given = {"temperature": "0.9", "seed": 5, "max_tokens": "7", "logprobs": 1, "stop": None}
    in_json = call(
        input_ids=prompt(), return_output_ids=True, sampling_parameters=json.dumps(given)
    )
    as_inputs = good(temperature=0.9, seed=5, max_tokens=7, logprobs=1)
    assert in_json.error is None
    assert in_json.output_ids == as_inputs.output_ids
    assert in_json.logprobs == as_inputs.logprobs


def test_exclude_input_in_output(good: Ask) -> None:
    plain = good(text_input=TEXT).text
    assert good(text_input=TEXT, exclude_input_in_output=True).text == plain
    assert good(text_input=TEXT, exclude_input_in_output=False).text == TEXT + plain


@pytest.mark.parametrize(
    "name", ["finish_reason", "num_input_tokens", "num_output_tokens", "timings", "output_ids"]
)
def test_return_switches(call: Ask, name: str) -> None:
    request = {"input_ids": prompt(), "max_tokens": 3}
    shown = call(**request, **{f"return_{name}": True}).responses[-1]
    hidden = call(**request, **{f"return_{name}": False}).responses[-1]
    assert shown[name] not in ([], [""])
    assert name not in hidden
    by_default = call(**request).responses[-1]
    assert (name in by_default) == (name != "output_ids")


def test_timings(good: Ask) -> None:
    timings = json.loads(
        good(input_ids=prompt(seed=time.monotonic_ns(), length=200)).final("timings")
    )
    assert timings["path"] == "remote"
    assert timings["prefill_worker"] == "prefill_0_0"
    assert timings["decode_worker"] == "decode_0_0"
    assert timings["kv_bytes"] > 0
    assert timings["retries"] == timings["cached_tokens"] == 0
    for name in ("queue_ms", "prefill_ms", "transfer_ms", "decode_ms", "ttft_ms"):
        assert 0 <= timings[name] < 60_000


def test_the_vllm_quickstart(tiny_server: TandemServer, oracle: Oracle) -> None:
    """``curl -d '{"text_input": ..., "parameters": {"stream": false, "temperature": 0}}'``."""
    parameters = {"stream": False, "temperature": 0, "max_tokens": 5, "return_output_ids": True}
    expected = oracle.greedy(oracle.tokenizer.encode(TEXT), 5)
    for endpoint in ("llm/generate", "llm/generate_stream"):
        body = {"text_input": TEXT, "parameters": parameters}
        assert post(tiny_server, endpoint, body).output_ids == expected
    request = infer_request(
        "llm",
        tensors_of({"text_input": TEXT, "stream": False}),
        {"temperature": 0.0, "max_tokens": 5, "return_output_ids": True},
    )
    assert stream_infer(tiny_server, request).output_ids == expected


# ---- metadata and metrics ------------------------------------------------------------------


def test_metadata_of_llm(tiny_server: TandemServer) -> None:
    inputs, outputs = metadata(tiny_server, "llm")
    assert inputs == INPUTS
    assert outputs == OUTPUTS


def test_metadata_of_the_ensemble(tiny_server: TandemServer) -> None:
    inputs, outputs = metadata(tiny_server, "ensemble")
    assert inputs == {k: v for k, v in INPUTS.items() if k not in ("input_ids", "logprobs")}
    assert outputs == OUTPUTS


def metadata(server: TandemServer, model: str) -> tuple[dict[str, Any], dict[str, Any]]:
    found = httpx.get(f"{server.http_url}/v2/models/{model}").raise_for_status().json()
    inputs, outputs = (
        {tensor["name"]: (tensor["datatype"], tensor["shape"]) for tensor in found[key]}
        for key in ("inputs", "outputs")
    )
    return inputs, outputs


def test_a_fresh_server_shows_every_metric(
    fresh_tiny_server: tuple[TandemServer, list[tuple[str, dict[str, str], float]]],
) -> None:
    _, samples = fresh_tiny_server
    for families, owners in (
        (ORCHESTRATOR_FAMILIES, [{"orchestrator": "llm_0_0"}]),
        (ENGINE_FAMILIES, [{"worker": f"{r}_0_0", "role": r} for r in ("prefill", "decode")]),
    ):
        for family in families:
            name = family.name + ("_count" if family.kind == "histogram" else "")
            for owner in owners:
                for value in family.values or ("",):
                    labels = owner | ({family.label: value} if family.label else {})
                    assert any(s == name and ls == labels for s, ls, _ in samples), (name, labels)
