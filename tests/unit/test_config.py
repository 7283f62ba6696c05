import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem.config import (
    Deployment,
    EngineConfig,
    EngineSettings,
    OrchestratorSettings,
    PreprocessSettings,
    deployment_from_env,
    parse_parameters,
    release_runtime_dir,
)
from tandem.errors import ConfigError
from tandem.types import Policy, Role


def _triton(**values: str) -> dict[str, Any]:
    """As Triton hands ``parameters`` of config.pbtxt over."""
    return {name: {"string_value": value} for name, value in values.items()}


# ---- parameters ------------------------------------------------------------------------------


def test_parameters_become_typed_settings() -> None:
    settings = parse_parameters(
        EngineSettings,
        _triton(role="decode", block_size="32", lease_ttl_s="2.5", first_core="-1", dtype="auto"),
    )
    assert settings == EngineSettings(
        role=Role.DECODE, block_size=32, lease_ttl_s=2.5, first_core=-1, dtype="auto"
    )


def test_whole_numbers_are_seconds_too() -> None:
    assert parse_parameters(EngineSettings, _triton(role="prefill", lease_ttl_s="3")) == (
        EngineSettings(role=Role.PREFILL, lease_ttl_s=3.0)
    )


def test_defaults_need_no_parameters() -> None:
    assert parse_parameters(OrchestratorSettings, {}) == OrchestratorSettings()
    assert parse_parameters(PreprocessSettings, {}) == PreprocessSettings()
    assert parse_parameters(OrchestratorSettings, _triton(policy="never")).policy is Policy.NEVER


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (EngineSettings, "role", "context"),
        (EngineSettings, "role", ""),
        (EngineSettings, "block_size", "0"),
        (EngineSettings, "block_size", "-16"),
        (EngineSettings, "block_size", "16.5"),
        (EngineSettings, "block_size", "many"),
        (EngineSettings, "block_size", ""),
        (EngineSettings, "num_threads", "-1"),
        (EngineSettings, "first_core", "zero"),
        (EngineSettings, "lease_ttl_s", "0"),
        (EngineSettings, "lease_ttl_s", "-1"),
        (EngineSettings, "lease_ttl_s", "nan"),
        (EngineSettings, "pull_timeout_s", "inf"),
        (EngineSettings, "nixl_backend", "GDS"),
        (EngineSettings, "start_timeout_s", "1e30"),
        (OrchestratorSettings, "policy", "sometimes"),
        (OrchestratorSettings, "max_attempts", "0"),
        (OrchestratorSettings, "remote_prefill_min_tokens", "-1"),
        (PreprocessSettings, "max_prompt_bytes", "0"),
    ],
)
def test_a_bad_value_names_the_parameter(kind: Any, name: str, value: str) -> None:
    parameters = _triton(**({"role": "prefill"} if kind is EngineSettings else {}))
    with pytest.raises(ConfigError, match=f"parameter {name} = '{value}'"):
        parse_parameters(kind, parameters | _triton(**{name: value}))


@pytest.mark.parametrize("kind", [EngineSettings, OrchestratorSettings, PreprocessSettings])
def test_an_unknown_parameter_is_named_beside_the_known_ones(kind: Any) -> None:
    with pytest.raises(ConfigError, match="unknown parameter max_seqs, typo; known: .*max_") as e:
        parse_parameters(kind, _triton(max_seqs="1", typo="2"))
    for name in kind.__struct_fields__:
        assert name in str(e.value)


def test_a_missing_role_is_named() -> None:
    with pytest.raises(ConfigError, match="role"):
        parse_parameters(EngineSettings, {})


def test_settings_are_frozen() -> None:
    with pytest.raises(AttributeError):
        OrchestratorSettings().max_attempts = 2  # type: ignore[misc]


def test_an_engine_config_travels_as_msgpack() -> None:
    config = EngineConfig(
        deployment=Deployment(model="/m", runtime_dir="/r", secret=b"\x00\xff"),
        settings=EngineSettings(role=Role.PREFILL),
        worker="prefill_0_0",
        device="cuda:1",
        cores=(3, 4),
        channel="ipc:///r/engine",
    )
    payload = msgspec.msgpack.encode(config)
    assert msgspec.msgpack.decode(payload, type=EngineConfig) == config


# ---- deployment ------------------------------------------------------------------------------


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return {"TANDEM_MODEL": str(model), "TANDEM_RUNTIME_DIR": f"/tmp/tandem-test-{os.getpid()}"}


@pytest.fixture(autouse=True)
def no_runtime_dir_is_left(environ: dict[str, str]) -> Any:
    yield
    path = Path(environ["TANDEM_RUNTIME_DIR"])
    if path.is_dir():
        for entry in path.iterdir():
            entry.unlink()
        path.rmdir()


def test_a_deployment_from_the_environment(environ: dict[str, str]) -> None:
    deployment = deployment_from_env(
        environ
        | {"TANDEM_SECRET": "geheim", "TANDEM_LOG_LEVEL": "debug", "TANDEM_KV_HOST": "10.0.0.7"}
    )
    assert deployment == Deployment(
        model=environ["TANDEM_MODEL"],
        runtime_dir=environ["TANDEM_RUNTIME_DIR"],
        secret=b"geheim",
        is_secret_shared=True,
        log_level="DEBUG",
        kv_host="10.0.0.7",
    )
    assert not (Path(deployment.runtime_dir) / "secret").exists()


ROUTER = {
    "TANDEM_SECRET": "geheim",
    "TANDEM_STREAM_HOST": "10.0.0.1",
    "TANDEM_PREFILL_URLS": "10.0.0.2:8001, grpc://prefill.svc:8001",
    "TANDEM_DECODE_URLS": "[fd00::3]:8001",
}


def test_a_router_knows_its_servers(environ: dict[str, str]) -> None:
    deployment = deployment_from_env(environ | ROUTER)
    assert deployment.stream_host == "10.0.0.1"
    assert deployment.prefill_servers == (("10.0.0.2", 8001), ("prefill.svc", 8001))
    assert [str(address) for address in deployment.decode_servers] == ["[fd00::3]:8001"]


@pytest.mark.parametrize("missing", ["TANDEM_SECRET", "TANDEM_STREAM_HOST", "TANDEM_DECODE_URLS"])
def test_a_router_needs_all_of_its_addresses(environ: dict[str, str], missing: str) -> None:
    with pytest.raises(ConfigError, match=missing):
        deployment_from_env(environ | ROUTER | {missing: ""})


@pytest.mark.parametrize(
    "value", ["10.0.0.2", "host:", ":8001", "host:0", "host:65536", "http://h:1", "u@h:1", "h:1/p"]
)
def test_a_server_is_a_host_and_a_port(environ: dict[str, str], value: str) -> None:
    with pytest.raises(ConfigError, match="TANDEM_DECODE_URLS: "):
        deployment_from_env(environ | ROUTER | {"TANDEM_DECODE_URLS": f"good:8001,{value}"})


def test_workers_of_several_hosts_have_names_of_their_own(environ: dict[str, str]) -> None:
    here, there = (
        deployment_from_env(environ | {"TANDEM_KV_HOST": host})
        for host in ("127.0.0.1", "10.0.0.7")
    )
    assert here.worker_name("decode_0_0") == "decode_0_0"
    directory = Path(there.runtime_dir).name
    assert there.worker_name("decode_0_0") == f"decode_0_0@10.0.0.7:{directory}"


def test_a_relative_model_path_becomes_absolute(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(environ["TANDEM_MODEL"]).parent)
    deployment = deployment_from_env(environ | {"TANDEM_MODEL": "model"})
    assert deployment.model == environ["TANDEM_MODEL"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"TANDEM_MODEL": ""}, "TANDEM_MODEL is not set"),
        ({"TANDEM_MODEL": "/no/such/model"}, "TANDEM_MODEL = '/no/such/model': no config.json"),
        ({"TANDEM_RUNTIME_DIR": "/tmp/" + "x" * 60}, "TANDEM_RUNTIME_DIR = .* longer than 60"),
        ({"TANDEM_LOG_LEVEL": "loud"}, "TANDEM_LOG_LEVEL = 'LOUD': one of DEBUG, INFO"),
        ({"TANDEM_KV_HOST": "node-1"}, "TANDEM_KV_HOST = 'node-1': not the IP address of a host"),
        ({"TANDEM_KV_HOST": "0.0.0.0"}, "TANDEM_KV_HOST = '0.0.0.0': not the IP address of a host"),
    ],
)
def test_a_bad_variable_is_named(
    environ: dict[str, str], change: dict[str, str], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        deployment_from_env(environ | change)


def test_the_runtime_dir_is_private(environ: dict[str, str]) -> None:
    deployment_from_env(environ)
    mode = Path(environ["TANDEM_RUNTIME_DIR"]).stat().st_mode
    assert stat.S_IMODE(mode) == 0o700


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o707, 0o701])
def test_a_runtime_dir_that_others_may_enter_is_refused(environ: dict[str, str], mode: int) -> None:
    path = Path(environ["TANDEM_RUNTIME_DIR"])
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"{path}: must belong to this user with mode 0700"):
        deployment_from_env(environ)


def test_the_secret_is_shared_through_a_private_file(environ: dict[str, str]) -> None:
    first, second = deployment_from_env(environ), deployment_from_env(environ)
    assert first.secret == second.secret and len(first.secret) == 32
    directory = Path(environ["TANDEM_RUNTIME_DIR"])
    assert [path.name for path in directory.iterdir()] == ["secret"], "no draft is left"
    assert stat.S_IMODE((directory / "secret").stat().st_mode) == 0o600


def test_processes_that_start_at_once_agree_on_the_secret(environ: dict[str, str]) -> None:
    code = "from tandem.config import *; print(deployment_from_env().secret.hex())"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    secrets = {process.communicate(timeout=20)[0] for process in processes}
    assert len(secrets) == 1 and len(bytes.fromhex(secrets.pop())) == 32


def test_two_deployments_have_two_secrets(environ: dict[str, str]) -> None:
    first = deployment_from_env(environ)
    release_runtime_dir(first)
    assert deployment_from_env(environ).secret != first.secret


def test_the_secret_shows_in_no_repr(environ: dict[str, str]) -> None:
    deployment = deployment_from_env(environ | {"TANDEM_SECRET": "geheim"})
    config = EngineConfig(
        deployment=deployment,
        settings=EngineSettings(role=Role.DECODE),
        worker="w",
        device="cpu",
        channel="c",
    )
    assert "geheim" not in repr(deployment) + str(deployment) + repr(config)


def test_the_last_process_removes_the_runtime_dir(environ: dict[str, str]) -> None:
    deployment = deployment_from_env(environ)
    path = Path(deployment.runtime_dir)
    socket = path / "stream-llm_0_0"
    socket.touch()
    release_runtime_dir(deployment)
    assert (path / "secret").exists(), "somebody is still there"
    socket.unlink()
    release_runtime_dir(deployment)
    assert not path.exists()
    release_runtime_dir(deployment)
