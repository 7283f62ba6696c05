from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from tandem.types import Policy
from tandem_cli.errors import CliError
from tandem_cli.overrides import parse_override
from tandem_cli.repository import DEFAULT_REPOSITORY, RepositoryPlan, render

ENGINE = """
name: "{name}"
backend: "python"
instance_group [ {{ kind: KIND_CPU count: 1 }} ]
parameters [ {{ key: "role" value: {{ string_value: "{name}" }} }} ]
"""
GPU = """
name: "{name}"
backend: "python"
instance_group [ {{ kind: KIND_GPU count: 1 gpus: [ 0, 1, 2 ] }} ]
parameters [
  {{ key: "role" value: {{ string_value: "{name}" }} }},
  {{ key: "device" value: {{ string_value: "cuda" }} }}
]
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    repository = tmp_path / "source"
    for name in ("prefill", "decode"):
        _write(repository / name / "config.pbtxt", ENGINE.format(name=name))
        _write(repository / name / "configs" / "gpu.pbtxt", GPU.format(name=name))
    _write(repository / "llm" / "config.pbtxt", 'name: "llm" backend: "python"')
    _write(repository / "ensemble" / "config.pbtxt", 'name: "ensemble" platform: "ensemble"')
    _write(repository / "llm" / "1" / "model.py", "# model")
    _write(repository / "llm" / "1" / "__pycache__" / "model.pyc", "")
    return repository


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _config(path: Path) -> Any:
    return text_format.Parse(path.read_text(), model_config_pb2.ModelConfig())


def _parameters(path: Path) -> dict[str, str]:
    return {key: value.string_value for key, value in _config(path).parameters.items()}


def test_instances_policy_and_cores_are_written(source: Path, tmp_path: Path) -> None:
    plan = RepositoryPlan(
        policy=Policy.ALWAYS, prefill_instances=1, decode_instances=3, num_cores=8
    )
    rendered = render(source, tmp_path / "copy", plan)
    assert rendered.instances == {"prefill": 1, "decode": 3, "llm": 1, "ensemble": 0}
    assert rendered.num_instances == 5
    assert _parameters(tmp_path / "copy/llm/config.pbtxt") == {"policy": "always"}
    decode = tmp_path / "copy/decode/config.pbtxt"
    assert _config(decode).instance_group[0].count == 3
    assert _parameters(decode) == {
        "role": "decode", "first_core": "2", "cores_per_instance": "2",
    }  # fmt: skip


def test_source_is_left_alone_and_caches_are_not_copied(source: Path, tmp_path: Path) -> None:
    before = (source / "llm/config.pbtxt").read_text()
    render(source, tmp_path / "copy", RepositoryPlan())
    assert (source / "llm/config.pbtxt").read_text() == before
    assert (tmp_path / "copy/llm/1/model.py").read_text() == "# model"
    assert not (tmp_path / "copy/llm/1/__pycache__").exists()


def test_policy_never_leaves_the_prefill_model_out(source: Path, tmp_path: Path) -> None:
    rendered = render(source, tmp_path / "copy", RepositoryPlan(policy=Policy.NEVER, num_cores=2))
    assert "prefill" not in rendered.instances
    assert not (tmp_path / "copy/prefill").exists()
    decode = _parameters(tmp_path / "copy/decode/config.pbtxt")
    assert decode["cores_per_instance"] == "2"


def test_policy_never_keeps_a_prefill_model_that_was_asked_for(
    source: Path, tmp_path: Path
) -> None:
    plan = RepositoryPlan(policy=Policy.NEVER, prefill_instances=2)
    assert render(source, tmp_path / "copy", plan).instances["prefill"] == 2


def test_other_policies_need_a_prefill_instance() -> None:
    with pytest.raises(CliError, match="--policy auto needs a prefill instance"):
        RepositoryPlan(prefill_instances=0)


def test_override_beats_what_is_worked_out(source: Path, tmp_path: Path) -> None:
    plan = RepositoryPlan(overrides=(parse_override("decode.first_core=-1"),), num_cores=4)
    render(source, tmp_path / "copy", plan)
    assert _parameters(tmp_path / "copy/decode/config.pbtxt")["first_core"] == "-1"
    assert _parameters(tmp_path / "copy/prefill/config.pbtxt")["first_core"] == "0"


def test_bad_value_stops_before_a_server_is_started(source: Path, tmp_path: Path) -> None:
    plan = RepositoryPlan(overrides=(parse_override("kv_cache_mb=0"),))
    with pytest.raises(CliError, match="kv_cache_mb = '0'"):
        render(source, tmp_path / "copy", plan)


def test_profile_keeps_its_own_counts_and_is_not_pinned(source: Path, tmp_path: Path) -> None:
    rendered = render(source, tmp_path / "copy", RepositoryPlan(profile="gpu", num_cores=8))
    assert rendered.instances == {"prefill": 3, "decode": 3, "llm": 1, "ensemble": 0}
    profile = _parameters(tmp_path / "copy/decode/configs/gpu.pbtxt")
    assert profile == {"role": "decode", "device": "cuda"}


def test_profile_takes_counts_and_overrides(source: Path, tmp_path: Path) -> None:
    plan = RepositoryPlan(
        profile="gpu", decode_instances=2, overrides=(parse_override("decode.kv_cache_mb=9"),)
    )
    rendered = render(source, tmp_path / "copy", plan)
    assert rendered.instances["decode"] == 6  # two on each of three GPUs
    assert _parameters(tmp_path / "copy/decode/configs/gpu.pbtxt")["kv_cache_mb"] == "9"
    assert "kv_cache_mb" not in _parameters(tmp_path / "copy/decode/config.pbtxt")


def test_unknown_profile_lists_the_known_ones(source: Path, tmp_path: Path) -> None:
    with pytest.raises(CliError, match="--profile h999: unknown; known: cpu, gpu"):
        render(source, tmp_path / "copy", RepositoryPlan(profile="h999"))


def test_folder_without_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="no model repository"):
        render(tmp_path, tmp_path / "copy", RepositoryPlan())


def test_broken_config_names_the_file(source: Path, tmp_path: Path) -> None:
    (source / "llm/config.pbtxt").write_text("name: {")
    with pytest.raises(CliError, match=r"llm/config\.pbtxt"):
        render(source, tmp_path / "copy", RepositoryPlan())


@pytest.mark.parametrize("profile", ["cpu", "h100-a100"])
def test_own_repository_renders(tmp_path: Path, profile: str) -> None:
    rendered = render(DEFAULT_REPOSITORY, tmp_path / "copy", RepositoryPlan(profile=profile))
    assert set(rendered.instances) == {"llm", "ensemble", "preprocess", "prefill", "decode"}
