import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.config import OrchestratorSettings
from tandem.errors import ConfigError, ErrorCode, InvalidRequest
from tandem.orchestrator.contract import parse_request
from tandem.orchestrator.contract_fields import FIELDS
from tandem.orchestrator.generate_request import GenerateRequest
from tandem.orchestrator.sampling_defaults import SamplingDefaults, load_sampling_defaults
from tandem.types import SamplingParams

SETTINGS = OrchestratorSettings(max_prompt_bytes=1000, max_stop_strings=3)


def text(*values: str | bytes) -> np.ndarray:
    return np.array([v.encode() if isinstance(v, str) else v for v in values], dtype=np.object_)


def int32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def fp32(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def parse(
    parameters: Mapping[str, bool | int | float | str] | None = None, **inputs: np.ndarray
) -> GenerateRequest:
    if not inputs.keys() & {"text_input", "messages", "input_ids"}:
        inputs["text_input"] = text("hello")
    return parse_request(inputs, parameters or {}, SETTINGS)


def parse_json(values: Any) -> GenerateRequest:
    return parse(sampling_parameters=text(json.dumps(values)))


def refused(field: str, *parts: str) -> Any:
    pattern = ".*".join(re.escape(part) for part in (f"{field}: ", *parts))
    return pytest.raises(InvalidRequest, match=f"^{pattern}")


# Prompts


def test_a_bare_prompt_leaves_everything_to_the_defaults() -> None:
    request = parse(text_input=text("hello"))
    assert request == GenerateRequest(text_input="hello")
    assert (request.stream, request.exclude_input_in_output) == (False, True)
    assert (request.return_finish_reason, request.return_output_ids) == (True, False)
    assert request.prompt_field == "text_input"


def test_token_ids_are_a_prompt() -> None:
    assert parse(input_ids=int32(5, 6, 7)).input_ids == (5, 6, 7)
    assert parse(input_ids=int32(5, 6, 7).reshape(1, 3)).input_ids == (5, 6, 7)


def test_messages_are_a_prompt_and_text_parts_become_lines() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    assert parse(messages=text(json.dumps(messages))).messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one\ntwo"},
    )


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_element_may_have_any_number_of_axes(shape: tuple[int, ...]) -> None:
    assert parse(text_input=text("hello").reshape(shape)).text_input == "hello"


def test_exactly_one_prompt_is_wanted() -> None:
    with refused("text_input", "exactly one of text_input, messages, input_ids", "none"):
        parse_request({}, {}, SETTINGS)
    with refused("input_ids", "exactly one", "text_input and input_ids"):
        parse(text_input=text("hello"), input_ids=int32(1))


def test_a_prompt_must_not_be_empty() -> None:
    with refused("text_input", "must not be empty"):
        parse(text_input=text(""))
    with refused("input_ids", "must not be empty"):
        parse(input_ids=int32())
    with refused("messages", "at least one message"):
        parse(messages=text("[]"))


def test_a_prompt_is_limited_in_bytes() -> None:
    assert parse(text_input=text("é" * 500)).text_input == "é" * 500
    with refused("text_input", "at most 1000 bytes", "1002"):
        parse(text_input=text("é" * 501))


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ('[{"role": "user"', "truncated"),
        ('{"role": "user"}', "Expected `array`"),
        ('[{"role": "user"}]', "missing required field `content`"),
        ('[{"role": "user", "content": 5}]', r"\$\[0\]\.content"),
        ('[{"role": "user", "content": "a", "tool": 1}]', "unknown field `tool`"),
        ('[{"role": "user", "content": [{"type": "image_url"}]}]', "image_url"),
        ('[{"role": "user", "content": "\\ud800, a lone half"}]', "surrogate"),
        ("[" * 900, "recursion|truncated|Expected"),
    ],
)
def test_bad_messages_are_refused_with_the_place(messages: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^messages: must be a JSON list .*({reason})"):
        parse(messages=text(messages))


# Every way in


def test_tensors_carry_every_field() -> None:
    request = parse(
        stream=np.array([True]),
        max_tokens=int32(7),
        min_tokens=int32(2),
        temperature=fp32(0.5),
        top_p=fp32(0.25),
        top_k=int32(-1),
        min_p=fp32(0.125),
        repetition_penalty=fp32(1.5),
        presence_penalty=fp32(-2),
        frequency_penalty=fp32(2),
        seed=np.array([-(2**63)], dtype=np.int64),
        stop=text("\n", "END"),
        stop_token_ids=int32(3, 4),
        ignore_eos=np.array([True]),
        logprobs=int32(1),
        n=int32(1),
        exclude_input_in_output=np.array([False]),
        return_finish_reason=np.array([False]),
        return_num_input_tokens=np.array([False]),
        return_num_output_tokens=np.array([False]),
        return_timings=np.array([False]),
        return_output_ids=np.array([True]),
    )
    assert request == GenerateRequest(
        text_input="hello",
        stream=True,
        max_tokens=7,
        min_tokens=2,
        temperature=0.5,
        top_p=0.25,
        top_k=-1,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        seed=-(2**63),
        stop=("\n", "END"),
        stop_token_ids=(3, 4),
        ignore_eos=True,
        logprobs=1,
        n=1,
        exclude_input_in_output=False,
        return_finish_reason=False,
        return_num_input_tokens=False,
        return_num_output_tokens=False,
        return_timings=False,
        return_output_ids=True,
    )


def test_request_parameters_carry_the_same_fields() -> None:
    request = parse({"temperature": 1, "stop": "END", "stream": True, "max_tokens": 5, "seed": -1})
    assert request == GenerateRequest(
        text_input="hello", temperature=1.0, stop=("END",), stream=True, max_tokens=5, seed=-1
    )
    assert type(request.temperature) is float


def test_a_prompt_may_come_as_a_request_parameter() -> None:
    assert parse_request({}, {"text_input": "hello"}, SETTINGS).text_input == "hello"


def test_sampling_parameters_carry_the_same_fields() -> None:
    request = parse_json({"temperature": 0.5, "stop": ["a", "b"], "stop_token_ids": [1], "seed": 3})
    assert request == GenerateRequest(
        text_input="hello", temperature=0.5, stop=("a", "b"), stop_token_ids=(1,), seed=3
    )


def test_sampling_parameters_may_spell_numbers_and_null() -> None:
    """As genai-perf does with ``--endpoint-type kserve --backend vllm``."""
    request = parse_json({"max_tokens": "64", "temperature": "0.5", "seed": None})
    assert (request.max_tokens, request.temperature, request.seed) == (64, 0.5, None)
    with refused("max_tokens", "a whole number of 32 bits", "'many'"):
        parse_json({"max_tokens": "many"})


def test_parameters_of_triton_itself_are_ignored() -> None:
    names = ["triton_enable_empty_final_response", "triton_x"]
    names += ["sequence_id", "sequence_start", "sequence_end", "triton_final_response"]
    assert parse(dict.fromkeys(names, 1)) == GenerateRequest(text_input="hello")


def test_an_unknown_key_is_refused_with_the_known_ones() -> None:
    with refused("temprature", "unknown", "temperature"):
        parse(temprature=fp32(1))
    with refused("temprature", "unknown", "temperature"):
        parse({"temprature": 1})
    with refused("temprature", "unknown", "temperature"):
        parse_json({"temprature": 1})
    with refused("text_input", "unknown"):
        parse_json({"text_input": "a prompt is no sampling parameter"})


def test_a_field_given_twice_is_refused() -> None:
    with refused("temperature", "given twice"):
        parse({"temperature": 1}, temperature=fp32(1))
    with refused("temperature", "given twice"):
        parse({"temperature": 1}, sampling_parameters=text('{"temperature": 1}'))
    with refused("sampling_parameters", "given twice"):
        parse({"sampling_parameters": "{}"}, sampling_parameters=text("{}"))


# Limits


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("max_tokens", 0, "at least 1"),
        ("min_tokens", -1, "at least 0"),
        ("temperature", -0.5, "from 0 to 100"),
        ("temperature", 101.0, "from 0 to 100"),
        ("top_p", 0.0, "above 0 and at most 1"),
        ("top_p", 1.5, "above 0 and at most 1"),
        ("top_k", -2, "at least 0, or -1 for off"),
        ("min_p", -0.5, "from 0 to 1"),
        ("min_p", 1.5, "from 0 to 1"),
        ("repetition_penalty", 0.0, "above 0 and at most 100"),
        ("repetition_penalty", 101.0, "above 0 and at most 100"),
        ("presence_penalty", -2.5, "from -2 to 2"),
        ("frequency_penalty", 2.5, "from -2 to 2"),
        ("logprobs", 2, "0 or 1"),
        ("logprobs", -1, "0 or 1"),
        ("n", 2, "only n = 1 is supported"),
        ("stop", "", "from 1 to 1024 bytes"),
        ("stop", "x" * 1025, "from 1 to 1024 bytes"),
    ],
)
def test_a_value_beyond_its_limit_is_refused_on_every_way_in(
    field: str, value: int | float | str, limit: str
) -> None:
    shown = repr(value)[:80]
    with refused(field, limit, f"got {shown}"):
        parse({field: value})
    with refused(field, limit, f"got {shown}"):
        parse_json({field: value})
    kinds: dict[type, Any] = {int: int32, float: fp32, str: text}
    with refused(field, limit, f"got {shown}"):
        parse(**{field: kinds[type(value)](value)})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("field", [n for n, f in FIELDS.items() if f.data_type.name == "FP32"])
def test_numbers_are_finite(field: str, value: float) -> None:
    with refused(field, "a finite number", repr(value)):
        parse({field: value})
    with refused(field, "a finite number", repr(value)):
        parse(**{field: fp32(value)})
    with refused("sampling_parameters", "JSON object"):
        parse_json({field: value})


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("max_tokens", True, "a whole number"),
        ("max_tokens", 1.0, "a whole number"),
        ("max_tokens", "1", "a whole number"),
        ("max_tokens", 2**31, "a whole number of 32 bits"),
        ("seed", 2**63, "a whole number of 64 bits"),
        ("temperature", True, "a finite number"),
        ("temperature", "warm", "a finite number"),
        ("stream", 1, "true or false"),
        ("stop", 5, "a string"),
        ("text_input", 5, "a string"),
        ("stop", "\ud800", "valid UTF-8"),
    ],
)
def test_a_wrong_type_is_refused(field: str, value: bool | int | float | str, wanted: str) -> None:
    with refused(field, wanted, f"got {value!r}"):
        parse_request({}, {field: value}, SETTINGS)


@pytest.mark.parametrize("value", [[1], {"a": 1}, 10**400, [[[]]]])
def test_json_of_a_wrong_type_is_refused(value: object) -> None:
    with refused("temperature", "a finite number"):
        parse_json({"temperature": value})


@pytest.mark.parametrize("value", ["[]", "5", "{", "", "[" * 5000, '{"a":' * 5000, "\ud83d"])
def test_sampling_parameters_must_be_a_json_object(value: str) -> None:
    with pytest.raises(InvalidRequest, match="^sampling_parameters: must be"):
        parse(sampling_parameters=text(value.encode("utf-8", "surrogatepass")))


@pytest.mark.parametrize(
    ("field", "array", "reason"),
    [
        ("max_tokens", np.array([1], dtype=np.int64), "must be a INT32 tensor; got dtype int64"),
        ("seed", int32(1), "must be a INT64 tensor; got dtype int32"),
        ("temperature", np.array([0.5]), "must be a FP32 tensor; got dtype float64"),
        ("stream", int32(1), "must be a BOOL tensor; got dtype int32"),
        ("stop", int32(1), "must be a BYTES tensor; got dtype int32"),
        ("max_tokens", int32(1, 2), "must have one element; got shape [2]"),
        ("max_tokens", int32(), "must have one element; got shape [0]"),
        ("stop_token_ids", int32(1, 2, 3, 4).reshape(2, 2), "must have one axis; got shape [2, 2]"),
        ("stop", text(b"\xff"), "must be valid UTF-8"),
        ("stop", np.array([5], dtype=np.object_), "must be bytes; got 5"),
    ],
)
def test_a_wrong_tensor_is_refused(field: str, array: np.ndarray, reason: str) -> None:
    with refused(field, reason):
        parse(**{field: array})


def test_bad_utf8_in_the_prompt_is_refused() -> None:
    with refused("text_input", "must be valid UTF-8"):
        parse(text_input=text(b"\xe4\xbd"))


def test_the_number_of_stop_strings_is_limited() -> None:
    assert parse(stop=text("a", "b", "c")).stop == ("a", "b", "c")
    assert parse(stop=text()).stop == ()
    with refused("stop", "at most 3 strings", "4"):
        parse(stop=text("a", "b", "c", "d"))


def test_stop_token_ids_are_limited() -> None:
    ids = np.arange(1024, dtype=np.int32)
    assert len(parse(stop_token_ids=ids).stop_token_ids) == 1024
    with refused("stop_token_ids", "at most 1024 ids", "1025"):
        parse(stop_token_ids=np.arange(1025, dtype=np.int32))


def test_what_the_queue_goes_by() -> None:
    """Triton hands on its own ``timeout``, in µs, as a parameter."""
    request = parse({"timeout": 2_500_000}, priority=int32(-3), cache_salt=text("tenant 7"))
    assert (request.timeout, request.priority, request.cache_salt) == (2_500_000, -3, "tenant 7")
    with refused("timeout", "at least 0", "-1"):
        parse({"timeout": -1})
    with refused("priority", "from -100 to 100", "101"):
        parse(priority=int32(101))
    with refused("cache_salt", "from 1 to 256 bytes", "''"):
        parse(cache_salt=text(""))


def test_min_tokens_is_at_most_max_tokens() -> None:
    assert parse(min_tokens=int32(5), max_tokens=int32(5)).min_tokens == 5
    with refused("min_tokens", "at most max_tokens = 4", "5"):
        parse(min_tokens=int32(5), max_tokens=int32(4))


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers())
)


@given(values=st.dictionaries(st.sampled_from(sorted(FIELDS)), VALUES))
@settings(max_examples=150)
def test_any_sampling_parameters_are_taken_or_refused_with_a_reason(values: Any) -> None:
    try:
        request = parse_json(values)
    except InvalidRequest as error:
        assert error.code is ErrorCode.INVALID_ARG
        assert str(error).startswith(f"{error.field}: ")
    else:
        assert isinstance(request, GenerateRequest)


# Sampling parameters of a sequence


def sampling(
    request: GenerateRequest, defaults: SamplingDefaults | None = None, prompt_len: int = 10
) -> SamplingParams:
    return request.sampling(
        defaults or SamplingDefaults(),
        prompt_len=prompt_len,
        max_model_len=100,
        default_max_tokens=16,
        draw_seed=lambda: 42,
    )


def test_a_request_without_wishes_gets_the_defaults_of_the_model() -> None:
    defaults = SamplingDefaults(
        temperature=0.5,
        top_p=0.75,
        top_k=40,
        min_p=0.25,
        repetition_penalty=1.5,
        eos_token_ids=(2, 3),
        max_new_tokens=20,
    )
    assert sampling(GenerateRequest(text_input="a"), defaults) == SamplingParams(
        max_tokens=20,
        temperature=0.5,
        top_p=0.75,
        top_k=40,
        min_p=0.25,
        repetition_penalty=1.5,
        seed=42,
        stop_token_ids=(2, 3),
    )


def test_what_a_request_asks_for_wins() -> None:
    defaults = SamplingDefaults(temperature=0.5, top_p=0.75, top_k=40, min_p=0.25)
    request = GenerateRequest(
        text_input="a",
        max_tokens=5,
        min_tokens=2,
        temperature=0.0,
        top_p=1.0,
        top_k=-1,
        min_p=0.0,
        seed=0,
        logprobs=1,
    )
    assert sampling(request, defaults) == SamplingParams(
        max_tokens=5, min_tokens=2, seed=0, logprobs=True
    )


def test_eos_ends_a_sequence_unless_ignored() -> None:
    defaults = SamplingDefaults(eos_token_ids=(2, 3))
    request = GenerateRequest(text_input="a", stop_token_ids=(3, 7))
    assert sampling(request, defaults).stop_token_ids == (2, 3, 7)
    ignoring = GenerateRequest(text_input="a", stop_token_ids=(7,), ignore_eos=True)
    assert sampling(ignoring, defaults).stop_token_ids == (7,)


def test_a_default_of_max_tokens_is_clipped_but_a_wish_is_refused() -> None:
    assert sampling(GenerateRequest(text_input="a")).max_tokens == 16
    assert sampling(GenerateRequest(text_input="a"), prompt_len=95).max_tokens == 5
    assert sampling(GenerateRequest(text_input="a", max_tokens=5), prompt_len=95).max_tokens == 5
    with refused("max_tokens", "at most 5", "95 tokens", "100", "got 6"):
        sampling(GenerateRequest(text_input="a", max_tokens=6), prompt_len=95)
    with refused("min_tokens", "at most max_tokens, by default 16", "got 17"):
        sampling(GenerateRequest(text_input="a", min_tokens=17))


@pytest.mark.parametrize(
    "request_",
    [
        GenerateRequest(text_input="a"),
        GenerateRequest(messages=({"role": "user", "content": "a"},)),
        GenerateRequest(input_ids=(1,)),
    ],
)
def test_a_prompt_must_leave_room_for_one_token(request_: GenerateRequest) -> None:
    assert sampling(request_, prompt_len=99).max_tokens == 1
    with refused(request_.prompt_field, "at most 99 tokens", "100", "got 100"):
        sampling(request_, prompt_len=100)
    with refused(request_.prompt_field, "at least 1 token"):
        sampling(request_, prompt_len=0)


def test_token_ids_outside_the_vocabulary_are_refused() -> None:
    GenerateRequest(input_ids=(0, 9), stop_token_ids=(9,)).check_vocabulary(10)
    with refused("input_ids", "from 0 to 9", "got 10 at position 1"):
        GenerateRequest(input_ids=(0, 10)).check_vocabulary(10)
    with refused("stop_token_ids", "from 0 to 9", "got -1 at position 0"):
        GenerateRequest(text_input="a", stop_token_ids=(-1,)).check_vocabulary(10)


# Defaults of a model


def write_json(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values))


def test_a_model_without_files_is_greedy(tmp_path: Path) -> None:
    assert load_sampling_defaults(tmp_path) == SamplingDefaults()


def test_a_model_that_samples_gives_its_parameters(tmp_path: Path) -> None:
    write_json(
        tmp_path / "generation_config.json",
        {
            "do_sample": True,
            "top_p": 0.9,
            "top_k": 20,
            "min_p": None,
            "repetition_penalty": 1.05,
            "eos_token_id": [1, 2],
            "max_new_tokens": 64,
            "transformers_version": "5.0",
        },
    )
    assert load_sampling_defaults(tmp_path) == SamplingDefaults(
        temperature=1.0,
        top_p=0.9,
        top_k=20,
        repetition_penalty=1.05,
        eos_token_ids=(1, 2),
        max_new_tokens=64,
    )


def test_a_model_that_does_not_sample_is_greedy(tmp_path: Path) -> None:
    values = {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1, "eos_token_id": 7}
    write_json(tmp_path / "generation_config.json", values)
    assert load_sampling_defaults(tmp_path) == SamplingDefaults(
        repetition_penalty=1.1, eos_token_ids=(7,)
    )


def test_eos_comes_from_the_model_config_where_the_other_names_none(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"eos_token_id": 5, "hidden_size": 8})
    assert load_sampling_defaults(tmp_path).eos_token_ids == (5,)
    write_json(tmp_path / "generation_config.json", {"eos_token_id": 6})
    assert load_sampling_defaults(tmp_path).eos_token_ids == (6,)


@pytest.mark.parametrize("values", [{"top_p": 0}, {"temperature": "warm"}, [], {"top_k": 1.5}])
def test_a_bad_default_stops_the_start(tmp_path: Path, values: Any) -> None:
    write_json(tmp_path / "generation_config.json", values)
    with pytest.raises(ConfigError, match=r"generation_config\.json: "):
        load_sampling_defaults(tmp_path)
