from __future__ import annotations

import pytest

from tandem_cli.errors import CliError
from tandem_cli.overrides import check_parameters, overrides_of, parse_override


def test_key_goes_to_every_model_that_knows_it() -> None:
    overrides = [parse_override("max_model_len=512"), parse_override("kv_cache_mb=64")]
    assert overrides_of(overrides, "decode") == {"max_model_len": "512", "kv_cache_mb": "64"}
    assert overrides_of(overrides, "llm") == {"max_model_len": "512"}
    assert overrides_of(overrides, "preprocess") == {}
    assert overrides_of(overrides, "ensemble") == {}


def test_model_name_limits_an_override_and_wins() -> None:
    overrides = [parse_override("decode.kv_cache_mb=1"), parse_override("kv_cache_mb=2")]
    assert overrides_of(overrides, "decode") == {"kv_cache_mb": "1"}
    assert overrides_of(overrides, "prefill") == {"kv_cache_mb": "2"}


def test_value_may_hold_equals_signs_and_dots() -> None:
    assert parse_override("transport=a=b.c").value == "a=b.c"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("block_size", "expected KEY=VALUE"),
        ("=4", "expected KEY=VALUE"),
        ("blok_size=4", "unknown key 'blok_size'; known: .*block_size"),
        ("nope.block_size=4", "no model 'nope'; known: llm"),
        ("preprocess.block_size=4", "unknown key 'block_size'; known: max_prompt_bytes"),
        ("policy=never", "use --policy"),
        ("decode.role=prefill", "follows from the model"),
    ],
)
def test_bad_overrides_are_named(text: str, problem: str) -> None:
    with pytest.raises(CliError, match=problem) as error:
        parse_override(text)
    assert f"--set {text}" in str(error.value)


def test_value_that_the_model_would_refuse_is_an_error() -> None:
    with pytest.raises(CliError, match="model decode: parameter block_size = 'x'"):
        check_parameters("decode", {"role": "decode", "block_size": "x"})
    check_parameters("decode", {"role": "decode", "block_size": "16"})
    check_parameters("somebody_elses", {"anything": "goes"})
