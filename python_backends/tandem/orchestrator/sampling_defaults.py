"""What a model's own files say about sampling, for what a request leaves open."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from tandem.errors import ConfigError

_NonNegative = Annotated[float, Meta(ge=0)]


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Defaults of one model; without any it is greedy. The same "off" values as SamplingParams."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    eos_token_ids: tuple[int, ...] = ()
    max_new_tokens: int | None = None


class _GenerationConfig(msgspec.Struct):
    """The fields read of generation_config.json; None is "not set", as in transformers."""

    do_sample: bool | None = None
    temperature: _NonNegative | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: int | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    eos_token_id: int | list[int] | None = None
    max_new_tokens: Annotated[int, Meta(ge=1)] | None = None


class _ModelConfig(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


def load_sampling_defaults(model_dir: str | Path) -> SamplingDefaults:
    """Defaults from generation_config.json, and EOS from config.json where that names none.

    Its temperature, top_p, top_k and min_p count only with ``do_sample`` true. Raises
    ``ConfigError`` for a file that cannot be read or a value out of range.
    """
    generation = _read(Path(model_dir) / "generation_config.json", _GenerationConfig)
    eos = generation.eos_token_id
    if eos is None:
        eos = _read(Path(model_dir) / "config.json", _ModelConfig).eos_token_id
    sampled = generation if generation.do_sample else _GenerationConfig(temperature=0.0)
    return SamplingDefaults(
        temperature=_or(sampled.temperature, 1.0),
        top_p=_or(sampled.top_p, 1.0),
        top_k=max(_or(sampled.top_k, 0), 0),
        min_p=_or(sampled.min_p, 0.0),
        repetition_penalty=_or(generation.repetition_penalty, 1.0),
        eos_token_ids=_ids(eos),
        max_new_tokens=generation.max_new_tokens,
    )


_T = TypeVar("_T", float, int)
_S = TypeVar("_S", _GenerationConfig, _ModelConfig)


def _or(value: _T | None, default: _T) -> _T:
    return default if value is None else value


def _ids(eos: int | list[int] | None) -> tuple[int, ...]:
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)


def _read(path: Path, kind: type[_S]) -> _S:
    if not path.is_file():
        return kind()
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}") from error
