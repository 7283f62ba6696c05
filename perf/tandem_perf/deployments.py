"""What a comparison measures: Tandem in some shape, or any other server."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import httpx
import msgspec

from tandem.types import Policy

DISAGGREGATED, COLOCATED, REPLICAS = "tandem-disaggregated", "tandem-colocated", "tandem-replicas"
BUILT_IN = (DISAGGREGATED, COLOCATED, REPLICAS)


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A server that is ready. ``url``: several, separated by commas, where the target takes turns.
    ``metrics_url``, ``pid``: what to watch. ``facts``: what a reader should know of it.
    """

    target: str
    url: str
    model: str | None = None
    metrics_url: str | None = None
    pid: int | None = None
    facts: dict[str, str] = field(default_factory=dict)


class Deployment(Protocol):
    @property
    def name(self) -> str: ...

    def running(self, log: Path) -> AbstractContextManager[Endpoint]:
        """Starts it fresh, on the cores that the calling thread may use; when the block ends
        nothing of it is left. Raises CliError if it does not become ready.
        """
        ...


class TandemDeployment(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="tandem",
    tag_field="kind",
):  # fmt: skip
    """Fields as in ``tandem serve``; each engine gets an equal share of the cores."""

    name: str
    policy: Policy = Policy.AUTO
    prefill_instances: int | None = None
    decode_instances: int | None = None
    settings: tuple[str, ...] = ()
    model: str = "smollm2"
    profile: str = "cpu"

    @contextlib.contextmanager
    def running(self, log: Path) -> Iterator[Endpoint]:
        from tandem_cli.server import TandemServer

        with log.open("w") as file:
            server = TandemServer(
                model=self.model, profile=self.profile, policy=self.policy,
                prefill_instances=self.prefill_instances, decode_instances=self.decode_instances,
                settings=self.settings, http_port=0, grpc_port=0, metrics_port=0,
                log=lambda line: print(line, file=file, flush=True),
            )  # fmt: skip
            with server:
                instances = server.repository.instances
                yield Endpoint(
                    target="triton-grpc",
                    url=f"grpc://{server.grpc_address}",
                    metrics_url=server.metrics_url,
                    pid=server.pid,
                    facts={
                        "server": _triton_version(server.http_url),
                        "policy": str(self.policy),
                        "prefill engines": str(instances.get("prefill", 0)),
                        "decode engines": str(instances.get("decode", 0)),
                        "model": server.model.name,
                        "settings": " ".join(self.settings) or "defaults",
                    },
                )


def built_in(
    name: str, policy: Policy, settings: tuple[str, ...], num_cores: int
) -> TandemDeployment:
    """``policy`` is that of the disaggregated one; the others never use a prefill pool, and prefill
    in whole chunks unless ``settings`` bound the ITL.
    """
    whole_chunks = ("max_itl_ms=0", *settings)
    make: dict[str, Callable[[], TandemDeployment]] = {
        DISAGGREGATED: lambda: TandemDeployment(
            name=name, policy=policy, prefill_instances=1, decode_instances=1, settings=settings
        ),
        COLOCATED: lambda: TandemDeployment(
            name=name, policy=Policy.NEVER, decode_instances=1, settings=whole_chunks
        ),
        REPLICAS: lambda: TandemDeployment(
            name=name, policy=Policy.NEVER, decode_instances=num_cores, settings=whole_chunks
        ),
    }
    return make[name]()


@contextlib.contextmanager
def on_cores(cores: frozenset[int] | None) -> Iterator[None]:
    """What this thread starts inside the block stays on these cores; None: where it is."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _triton_version(http_url: str) -> str:
    try:
        answer = httpx.get(f"{http_url}/v2", timeout=5).json()
        return f"{answer['name']} {answer['version']}"
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return "triton"
