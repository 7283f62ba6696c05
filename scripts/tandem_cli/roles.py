"""What one server of a deployment does, and what it must be told for that."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from tandem.types import Policy
from tandem_cli.errors import CliError


class ServerRole(StrEnum):
    """Everything, one pool, or only what clients talk to."""

    ALL = "all"
    PREFILL = "prefill"
    DECODE = "decode"
    ROUTER = "router"

    def has(self, model: str) -> bool:
        if self is ServerRole.ROUTER:
            return model not in (ServerRole.PREFILL, ServerRole.DECODE)
        return self is ServerRole.ALL or model == self


def check_environment(role: ServerRole, policy: Policy, environ: Mapping[str, str]) -> None:
    """Raises unless the addresses are set that this role needs, and no others."""
    if role is ServerRole.ALL:
        if environ.get("TANDEM_DECODE_URLS"):
            raise CliError("TANDEM_DECODE_URLS is set: only --role router calls other servers")
        return
    needed = {"TANDEM_SECRET": "the same text for all servers of the deployment"}
    if role is ServerRole.ROUTER:
        needed["TANDEM_STREAM_HOST"] = "this host's IP address for the other servers"
        needed["TANDEM_DECODE_URLS"] = "host:port of the gRPC of every decode server, or a DNS name"
        if policy is not Policy.NEVER:
            needed["TANDEM_PREFILL_URLS"] = "host:port of the gRPC of every prefill server"
    else:
        needed["TANDEM_KV_HOST"] = "this host's IP address for the other servers"
    missing = [f"  {name}: {what}" for name, what in needed.items() if not environ.get(name)]
    if missing:
        raise CliError("\n".join([f"--role {role} needs in its environment:", *missing]))
