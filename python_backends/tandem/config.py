"""Settings: read once from Triton's ``parameters`` and the environment, validated, frozen.

Parameters of config.pbtxt hold what differs per role (limits, transport, device); the environment
holds what differs per deployment: ``TANDEM_MODEL`` (directory), ``TANDEM_SECRET``,
``TANDEM_RUNTIME_DIR``, ``TANDEM_LOG_LEVEL``, and addresses: ``TANDEM_KV_HOST``,
``TANDEM_STREAM_HOST``, ``TANDEM_PREFILL_URLS``, ``TANDEM_DECODE_URLS``. An unknown parameter or a
bad value stops the start.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from tandem.addresses import ServerAddress, parse_ip_address, parse_servers
from tandem.errors import ConfigError
from tandem.types import Policy, Quantization, Role

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0, le=86_400)]  # seconds; excludes inf
LOCALHOST = "127.0.0.1"
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """What every process of one server shares; from the environment. Without ``stream_host`` its
    orchestrators hear only the engines of this host; without ``decode_servers`` they call only
    its own pools.
    """

    model: str
    runtime_dir: str
    secret: bytes
    is_secret_shared: bool = False  # with other servers; else it is random, of this one only
    log_level: str = "INFO"
    kv_host: str = LOCALHOST  # under which engines of other hosts reach those of this one
    stream_host: str = ""  # under which they reach its orchestrators
    prefill_servers: tuple[ServerAddress, ...] = ()
    decode_servers: tuple[ServerAddress, ...] = ()

    def __repr__(self) -> str:
        return f"Deployment(model={self.model!r}, runtime_dir={self.runtime_dir!r})"

    def worker_name(self, instance: str) -> str:
        """Of a Triton instance, unique among all servers of the deployment."""
        if self.kv_host == LOCALHOST:
            return instance
        return f"{instance}@{self.kv_host}:{Path(self.runtime_dir).name}"


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``parameters`` of the prefill and decode models."""

    role: Role
    device: str = "cpu"  # cpu | cuda (the GPU of the instance)
    dtype: str = "auto"  # auto | float32 | bfloat16 | float16
    quantization: Quantization = Quantization.NONE  # of the weights: none | int8
    transport: str = "shm"  # shm | cuda_ipc | nixl
    nixl_backend: Literal["UCX", "LIBFABRIC"] = "UCX"
    block_size: PositiveInt = 16  # tokens per KV block
    kv_cache_mb: PositiveInt = 512  # MiB of the slab of one engine
    max_model_len: PositiveInt = 2048  # prompt + output tokens of one request
    max_num_seqs: PositiveInt = 64  # sequences an engine holds at once
    max_num_batched_tokens: PositiveInt = 128  # tokens of one step: the prefill chunk
    max_itl_ms: NonNegativeInt = 100  # local prefills leave steps of decoding no longer; 0: off
    num_threads: NonNegativeInt = 0  # torch threads; 0: the engine's cores, or half of all
    first_core: int = -1  # -1: not pinned; else instance i has cores first + i*per ...
    cores_per_instance: PositiveInt = 1
    lease_ttl_s: PositiveFloat = 30.0
    pull_timeout_s: PositiveFloat = 5.0
    orchestrator_timeout_s: PositiveFloat = 5.0  # silence after which its sequences are dropped
    start_timeout_s: PositiveFloat = 600.0  # load time after which an engine is given up
    engine_timeout_s: PositiveFloat = 5.0  # silence after which a frozen engine is replaced
    step_timeout_s: PositiveFloat = 120.0  # length of one step after which the engine is replaced


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All one engine process needs; travels to it over stdin, so no secret shows in ``ps``."""

    deployment: Deployment
    settings: EngineSettings
    worker: str  # Triton's instance name, e.g. decode_0_1
    device: str  # cpu | cuda:N
    cores: tuple[int, ...] = ()
    channel: str  # ZeroMQ address of the shim


class OrchestratorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``parameters`` of the llm model."""

    policy: Policy = Policy.AUTO
    remote_prefill_min_tokens: NonNegativeInt = 128  # policy length: shorter prompts stay local
    block_size: PositiveInt = 16
    max_model_len: PositiveInt = 2048
    default_max_tokens: PositiveInt = 256
    max_queued_requests: PositiveInt = 1024  # of a priority class; more are refused (UNAVAILABLE)
    max_queued_tokens: PositiveInt = 262_144  # prompt tokens of a priority class, likewise
    max_calls_in_flight: PositiveInt = 12  # BLS calls per pool; Triton has 32 threads for them
    max_attempts: PositiveInt = 16  # placements without a new token before a request fails
    worker_timeout_s: PositiveFloat = 3.0  # silence after which a worker counts as dead
    max_prompt_bytes: PositiveInt = 1_000_000
    max_stop_strings: PositiveInt = 16
    max_stop_token_ids: PositiveInt = 1024


class PreprocessSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``parameters`` of the preprocess model."""

    max_prompt_bytes: PositiveInt = 1_000_000


_S = TypeVar("_S", EngineSettings, OrchestratorSettings, PreprocessSettings)


def parse_parameters(kind: type[_S], parameters: Mapping[str, Any]) -> _S:
    """Settings from the ``parameters`` of a Triton model config (``{name: {string_value}}``)."""
    values = {name: value["string_value"] for name, value in parameters.items()}
    unknown = values.keys() - set(kind.__struct_fields__)
    if unknown:
        known = ", ".join(kind.__struct_fields__)
        raise ConfigError(f"unknown parameter {', '.join(sorted(unknown))}; known: {known}")
    for name, value in values.items():
        try:
            msgspec.convert({name: value}, type=_single_field(kind, name), strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"parameter {name} = {value!r}: {error}") from error
    try:
        return msgspec.convert(values, type=kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"parameters: {error}") from error


def _single_field(kind: type[msgspec.Struct], name: str) -> type[msgspec.Struct]:
    field_type = next(f.type for f in msgspec.structs.fields(kind) if f.name == name)
    return msgspec.defstruct("Parameter", [(name, field_type)])


def deployment_from_env(environ: Mapping[str, str] = os.environ) -> Deployment:
    """The deployment of this process; all stubs of one tritonserver get the same one."""
    model = environ.get("TANDEM_MODEL", "")
    if not model:
        raise ConfigError("TANDEM_MODEL is not set: the directory of the model to serve")
    if not (Path(model) / "config.json").is_file():
        raise ConfigError(f"TANDEM_MODEL = {model!r}: no config.json in this directory")
    # Stubs are children of tritonserver, so its pid names the server they belong to.
    default_dir = f"/tmp/tandem-{os.getuid()}-{os.getppid()}"
    runtime_dir = Path(environ.get("TANDEM_RUNTIME_DIR") or default_dir)
    if len(str(runtime_dir)) > 60:  # unix socket paths end at 107 bytes
        raise ConfigError(f"TANDEM_RUNTIME_DIR = {str(runtime_dir)!r}: longer than 60 characters")
    runtime_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    if runtime_dir.stat().st_uid != os.getuid() or runtime_dir.stat().st_mode & 0o077:
        raise ConfigError(f"{runtime_dir}: must belong to this user with mode 0700")
    log_level = environ.get("TANDEM_LOG_LEVEL", "INFO").upper()
    if log_level not in LOG_LEVELS:
        raise ConfigError(f"TANDEM_LOG_LEVEL = {log_level!r}: one of {', '.join(LOG_LEVELS)}")
    secret = environ.get("TANDEM_SECRET", "")
    deployment = Deployment(
        model=str(Path(model).resolve()),
        runtime_dir=str(runtime_dir),
        secret=secret.encode() if secret else _shared_secret(runtime_dir / "secret"),
        is_secret_shared=bool(secret),
        log_level=log_level,
        kv_host=_address("TANDEM_KV_HOST", environ) or LOCALHOST,
        stream_host=_address("TANDEM_STREAM_HOST", environ),
        prefill_servers=_servers("TANDEM_PREFILL_URLS", environ),
        decode_servers=_servers("TANDEM_DECODE_URLS", environ),
    )
    _check_remote(deployment)
    return deployment


def _address(name: str, environ: Mapping[str, str]) -> str:
    value = environ.get(name, "")
    return parse_ip_address(name, value) if value else ""


def _servers(name: str, environ: Mapping[str, str]) -> tuple[ServerAddress, ...]:
    return parse_servers(name, environ.get(name, ""))


def _check_remote(deployment: Deployment) -> None:
    if deployment.prefill_servers and not deployment.decode_servers:
        raise ConfigError("TANDEM_PREFILL_URLS is set, TANDEM_DECODE_URLS is not")
    if deployment.decode_servers and not deployment.stream_host:
        raise ConfigError("TANDEM_DECODE_URLS is set: TANDEM_STREAM_HOST must be, too: the IP "
                          "address under which those servers reach this one")  # fmt: skip
    if deployment.stream_host and not deployment.is_secret_shared:
        raise ConfigError("TANDEM_STREAM_HOST is set: TANDEM_SECRET must be, too, and be the same "
                          "for all servers")  # fmt: skip


def _shared_secret(path: Path) -> bytes:
    """A random secret in a file of mode 0600; the first process writes it, the others read it."""
    draft = path.with_name(f"secret.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secrets.token_bytes(32))
    try:
        os.link(draft, path)  # atomic: fails where another process was first
    except FileExistsError:
        pass
    finally:
        draft.unlink()
    return path.read_bytes()


def release_runtime_dir(deployment: Deployment) -> None:
    """Removes the runtime directory once only the secret is left in it; every model calls this."""
    path = Path(deployment.runtime_dir)
    try:
        if {entry.name for entry in path.iterdir()} <= {"secret"}:
            (path / "secret").unlink(missing_ok=True)
            path.rmdir()
    except OSError:
        pass  # another process is doing the same, or `tandem serve` owns the directory
