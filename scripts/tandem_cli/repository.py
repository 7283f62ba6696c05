"""A working copy of the model repository with this start's instances and parameters.

The source is never written to: Triton reads the copy, which goes away with the server.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from tandem.types import Policy
from tandem_cli.cores import core_parameters
from tandem_cli.errors import CliError
from tandem_cli.overrides import Override, check_parameters, overrides_of
from tandem_cli.roles import ServerRole

DEFAULT_REPOSITORY = Path(__file__).resolve().parents[2] / "model_repository"
CPU_PROFILE = "cpu"  # what config.pbtxt says; Triton's --model-config-name is not used for it


@dataclass(frozen=True, kw_only=True)
class RepositoryPlan:
    """What one start changes. Counts of None keep what a hardware profile says."""

    role: ServerRole = ServerRole.ALL
    policy: Policy = Policy.AUTO
    profile: str = CPU_PROFILE
    prefill_instances: int | None = None
    decode_instances: int | None = None
    overrides: tuple[Override, ...] = ()
    num_cores: int = 1

    def __post_init__(self) -> None:
        needs_prefill = self.role.has("prefill") and self.policy is not Policy.NEVER
        if self.prefill_instances == 0 and needs_prefill:
            raise CliError(f"--policy {self.policy} needs a prefill instance; "
                           "--policy never does without")

    @property
    def counts(self) -> dict[str, int | None]:
        default = 1 if self.profile == CPU_PROFILE else None
        prefill, decode = self.prefill_instances, self.decode_instances
        if prefill is None:
            is_colocated = self.policy is Policy.NEVER and self.role is ServerRole.ALL
            prefill = 0 if is_colocated else default
        counts = {"prefill": prefill, "decode": default if decode is None else decode}
        return {model: count if self.role.has(model) else 0 for model, count in counts.items()}

    def parameters(self, model: str) -> dict[str, str]:
        """The parameters of one model that differ from its file."""
        found = {"policy": str(self.policy)} if model == "llm" else {}
        if self.role is not ServerRole.ALL and model in self.counts:
            found["transport"] = "nixl"  # the other pool is on another host
        prefill, decode = self.counts["prefill"], self.counts["decode"]
        if self.profile == CPU_PROFILE and (prefill or decode):
            assert prefill is not None and decode is not None
            found |= core_parameters(self.num_cores, prefill, decode).get(model, {})
        return found | overrides_of(self.overrides, model)


@dataclass(frozen=True)
class RenderedRepository:
    """``{model: instances}`` of the copy at ``path``; an ensemble has none."""

    path: Path
    instances: dict[str, int]

    @property
    def num_instances(self) -> int:
        return sum(self.instances.values())


def render(source: Path, target: Path, plan: RepositoryPlan) -> RenderedRepository:
    """Copies ``source`` to ``target`` (which must not exist) and edits what the plan changes."""
    models = sorted(path.parent.name for path in source.glob("*/config.pbtxt"))
    if not models:
        raise CliError(f"{source}: no model repository (no */config.pbtxt in it)")
    _check_profile(source, plan.profile)
    models = [m for m in models if plan.role.has(m) and plan.counts.get(m) != 0]
    instances = {}
    for model in models:
        shutil.copytree(
            source / model, target / model, ignore=shutil.ignore_patterns("__pycache__")
        )
        instances[model] = _edit(_effective_config(target / model, plan.profile), model, plan)
    return RenderedRepository(target, instances)


def _check_profile(source: Path, profile: str) -> None:
    known = sorted({path.stem for path in source.glob("*/configs/*.pbtxt")})
    if profile != CPU_PROFILE and profile not in known:
        raise CliError(f"--profile {profile}: unknown; known: {', '.join([CPU_PROFILE, *known])}")


def _effective_config(model: Path, profile: str) -> Path:
    """The file that Triton reads: the profile's where there is one, else config.pbtxt."""
    path = model / "configs" / f"{profile}.pbtxt"
    return path if profile != CPU_PROFILE and path.is_file() else model / "config.pbtxt"


def _edit(path: Path, model: str, plan: RepositoryPlan) -> int:
    """Writes the plan into one file; returns the number of instances."""
    config = _read(path)
    for group in config.instance_group:
        group.count = plan.counts.get(model) or group.count or 1
    for key, value in plan.parameters(model).items():
        config.parameters[key].string_value = value
    check_parameters(model, {key: v.string_value for key, v in config.parameters.items()})
    path.write_text(text_format.MessageToString(config))
    if config.platform == "ensemble":
        return 0
    return _num_instances(config.instance_group)


def _num_instances(groups: Iterable[Any]) -> int:
    return sum(group.count * max(1, len(group.gpus)) for group in groups) or 1


def _read(path: Path) -> Any:
    try:
        return text_format.Parse(path.read_text(), model_config_pb2.ModelConfig())
    except text_format.ParseError as error:
        raise CliError(f"{path}: {error}") from error
