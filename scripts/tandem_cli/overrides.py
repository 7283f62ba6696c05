"""``--set [MODEL.]KEY=VALUE``: parameters of the models, checked against their settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tandem.config import (
    EngineSettings,
    OrchestratorSettings,
    PreprocessSettings,
    parse_parameters,
)
from tandem.errors import ConfigError
from tandem_cli.errors import CliError

Settings = type[EngineSettings] | type[OrchestratorSettings] | type[PreprocessSettings]
SETTINGS: dict[str, Settings] = {
    "llm": OrchestratorSettings,
    "preprocess": PreprocessSettings,
    "prefill": EngineSettings,
    "decode": EngineSettings,
}
OTHER_WAY = {"policy": "use --policy", "role": "it follows from the model"}


@dataclass(frozen=True, kw_only=True)
class Override:
    key: str
    value: str
    model: str | None = None  # None: every model that knows the key

    def applies_to(self, model: str) -> bool:
        return self.key in known_keys(model) and self.model in (None, model)


def parse_override(text: str) -> Override:
    """Reads ``KEY=VALUE`` or ``MODEL.KEY=VALUE``; an unknown model or key is an error."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise CliError(f"--set {text}: expected KEY=VALUE or MODEL.KEY=VALUE")
    model, dot, key = name.rpartition(".")
    if dot and model not in SETTINGS:
        raise CliError(f"--set {text}: no model {model!r}; known: {', '.join(SETTINGS)}")
    models = [model] if dot else list(SETTINGS)
    known = {known_key for name in models for known_key in known_keys(name)}
    if key in OTHER_WAY:
        raise CliError(f"--set {text}: {key} cannot be set like this; {OTHER_WAY[key]}")
    if key not in known:
        raise CliError(f"--set {text}: unknown key {key!r}; known: {', '.join(sorted(known))}")
    return Override(key=key, value=value, model=model or None)


def overrides_of(overrides: Iterable[Override], model: str) -> dict[str, str]:
    """``{key: value}`` for one model; of two overrides the one that names the model wins."""
    found = [override for override in overrides if override.applies_to(model)]
    found.sort(key=lambda override: override.model is not None)
    return {override.key: override.value for override in found}


def known_keys(model: str) -> frozenset[str]:
    """The parameters of a model that a user may set."""
    settings = SETTINGS.get(model)
    fields = settings.__struct_fields__ if settings else ()
    return frozenset(fields) - OTHER_WAY.keys()


def check_parameters(model: str, parameters: Mapping[str, str]) -> None:
    """Raises for a value the model itself would refuse, before a server is started for it."""
    if model not in SETTINGS:
        return
    kind: Any = SETTINGS[model]
    try:
        parse_parameters(kind, {key: {"string_value": v} for key, v in parameters.items()})
    except ConfigError as error:
        raise CliError(f"model {model}: {error}") from error
