"""What a server of each role runs, and what it must be told."""

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
from tandem_cli.roles import ServerRole, check_environment

ENVIRONMENT = {
    "TANDEM_SECRET": "s",
    "TANDEM_STREAM_HOST": "10.0.0.1",
    "TANDEM_PREFILL_URLS": "10.0.0.2:8001",
    "TANDEM_DECODE_URLS": "10.0.0.3:8001",
    "TANDEM_KV_HOST": "10.0.0.2",
}


def rendered(tmp_path: Path, role: ServerRole, **plan: Any) -> set[str]:
    render(DEFAULT_REPOSITORY, tmp_path / "models", RepositoryPlan(role=role, **plan))
    return {path.name for path in (tmp_path / "models").iterdir()}


def parameters(tmp_path: Path, model: str) -> dict[str, str]:
    text = (tmp_path / "models" / model / "config.pbtxt").read_text()
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    return {key: value.string_value for key, value in config.parameters.items()}


@pytest.mark.parametrize(
    ("role", "models"),
    [
        (ServerRole.ALL, {"llm", "ensemble", "preprocess", "prefill", "decode"}),
        (ServerRole.ROUTER, {"llm", "ensemble", "preprocess"}),
        (ServerRole.PREFILL, {"prefill"}),
        (ServerRole.DECODE, {"decode"}),
    ],
)
def test_each_role_has_its_models(tmp_path: Path, role: ServerRole, models: set[str]) -> None:
    assert rendered(tmp_path, role) == models


def test_a_pool_of_its_own_has_all_cores_and_a_network(tmp_path: Path) -> None:
    rendered(tmp_path, ServerRole.DECODE, policy=Policy.NEVER, num_cores=4, decode_instances=2)
    found = parameters(tmp_path, "decode")
    assert (found["first_core"], found["cores_per_instance"]) == ("0", "2")
    assert found["transport"] == "nixl"


def test_a_prefill_server_has_its_pool_whatever_the_policy(tmp_path: Path) -> None:
    assert rendered(tmp_path, ServerRole.PREFILL, policy=Policy.NEVER) == {"prefill"}


def test_another_transport_can_be_set(tmp_path: Path) -> None:
    overrides = (parse_override("transport=shm"),)
    rendered(tmp_path, ServerRole.PREFILL, overrides=overrides)
    assert parameters(tmp_path, "prefill")["transport"] == "shm"


@pytest.mark.parametrize(
    ("role", "names"),
    [
        (ServerRole.ROUTER, {*ENVIRONMENT} - {"TANDEM_KV_HOST"}),
        (ServerRole.PREFILL, {"TANDEM_SECRET", "TANDEM_KV_HOST"}),
        (ServerRole.DECODE, {"TANDEM_SECRET", "TANDEM_KV_HOST"}),
    ],
)
def test_what_is_missing_is_named(role: ServerRole, names: set[str]) -> None:
    check_environment(role, Policy.AUTO, ENVIRONMENT)
    with pytest.raises(CliError) as error:
        check_environment(role, Policy.AUTO, {})
    assert {name for name in ENVIRONMENT if name in str(error.value)} == names


def test_a_colocated_deployment_needs_no_prefill_servers() -> None:
    environ = ENVIRONMENT | {"TANDEM_PREFILL_URLS": ""}
    check_environment(ServerRole.ROUTER, Policy.NEVER, environ)
    with pytest.raises(CliError, match="TANDEM_PREFILL_URLS"):
        check_environment(ServerRole.ROUTER, Policy.ALWAYS, environ)


def test_engines_of_its_own_would_be_idle_beside_other_servers() -> None:
    check_environment(ServerRole.ALL, Policy.AUTO, {})
    with pytest.raises(CliError, match="--role router"):
        check_environment(ServerRole.ALL, Policy.AUTO, ENVIRONMENT)
