"""What a user can choose about one server."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.types import Policy
from tandem_cli.errors import CliError
from tandem_cli.overrides import parse_override
from tandem_cli.repository import CPU_PROFILE, DEFAULT_REPOSITORY, RepositoryPlan
from tandem_cli.roles import ServerRole

LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of ``tandem serve``; its defaults are read from here."""

    model: str = "smollm2"
    role: ServerRole = ServerRole.ALL
    profile: str = CPU_PROFILE
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    policy: Policy = Policy.AUTO
    prefill_instances: int | None = None
    decode_instances: int | None = None
    log_level: str = "info"
    drain_timeout_s: float = 30.0
    settings: Sequence[str] = ()  # KEY=VALUE or MODEL.KEY=VALUE
    model_repository: Path = DEFAULT_REPOSITORY

    def __post_init__(self) -> None:
        if self.log_level not in LOG_LEVELS:
            raise CliError(f"--log-level {self.log_level}: one of {', '.join(LOG_LEVELS)}")

    def plan(self) -> RepositoryPlan:
        return RepositoryPlan(
            role=ServerRole(self.role),
            policy=Policy(self.policy),
            profile=self.profile,
            prefill_instances=self.prefill_instances,
            decode_instances=self.decode_instances,
            overrides=tuple(parse_override(text) for text in self.settings),
            num_cores=len(os.sched_getaffinity(0)),
        )
