"""Targets by name, imported on demand: grpc is slow to import."""

from __future__ import annotations

from importlib import import_module

from tandem_perf.targets.base import Target, TargetError, TargetOptions

_TARGETS = {
    "triton-grpc": "tandem_perf.targets.triton_grpc:TritonGrpcTarget",
    "triton-http": "tandem_perf.targets.triton_http:TritonHttpTarget",
    "openai": "tandem_perf.targets.openai:OpenAITarget",
    "openai-round-robin": "tandem_perf.targets.round_robin:RoundRobinTarget",
}
_SCHEMES = {
    "triton-grpc": ("grpc",),
    "triton-http": ("http", "https"),
    "openai": ("http", "https"),
    "openai-round-robin": ("http", "https"),
}
NAMES = tuple(_TARGETS)


def target_for(url: str) -> str:
    """The target a URL most likely means."""
    return "triton-grpc" if url.startswith("grpc://") else "triton-http"


def open_target(name: str, options: TargetOptions) -> Target:
    """Raises TargetError for an unknown name or a URL that does not fit it."""
    if name not in _TARGETS:
        raise TargetError(f"target {name!r}: one of {', '.join(NAMES)}")
    scheme = options.url.partition("://")[0]
    if scheme not in _SCHEMES[name]:
        wanted = " or ".join(f"{scheme}://" for scheme in _SCHEMES[name])
        raise TargetError(f"target {name}: the url must begin with {wanted}; got {options.url!r}")
    module, _, class_name = _TARGETS[name].partition(":")
    target: Target = getattr(import_module(module), class_name)(options)
    return target
