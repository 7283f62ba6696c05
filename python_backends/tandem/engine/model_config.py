"""What a model directory says about itself, read without torch: limits and fingerprint."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.errors import ConfigError
from tandem.kv.layout import KVLayout
from tandem.types import Quantization

# They change when the same weights are saved again, or name what KVLayout states itself.
_VOLATILE_KEYS = {"transformers_version", "_name_or_path", "torch_dtype", "dtype"}
_NUM_SAMPLES = 16  # places of a weight file that go into the fingerprint
_SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class ModelLimits:
    max_position_embeddings: int  # tokens of prompt + output the positions are defined for
    vocab_size: int


def model_limits(model_dir: str | Path) -> ModelLimits:
    """Limits from config.json. Raises ConfigError if the file or a needed key is missing."""
    config = read_config(model_dir)
    text = config.get("text_config", config)
    positions = text.get("max_position_embeddings", text.get("n_positions"))
    vocab_size = text.get("vocab_size", config.get("vocab_size"))
    if not isinstance(positions, int) or not isinstance(vocab_size, int):
        raise ConfigError(
            f"{model_dir}/config.json: needs vocab_size and max_position_embeddings (n_positions)"
        )
    return ModelLimits(min(positions, _longrope_limit(text, positions)), vocab_size)


def model_fingerprint(
    model_dir: str | Path, layout: KVLayout, quantization: Quantization = Quantization.NONE
) -> str:
    """32 hex digits, equal for two engines only if their KV blocks mean the same.

    Covers config.json, the name, size, safetensors header and evenly spaced samples of each weight
    file (reading all of it would take minutes), the layout of the blocks, and how the weights were
    quantized.
    """
    digest = hashlib.blake2b(digest_size=16)
    config = _without_volatile(read_config(model_dir))
    digest.update(json.dumps(config, sort_keys=True).encode())
    for path in weight_files(model_dir):
        size = path.stat().st_size
        digest.update(f"\n{path.name}:{size}\n".encode())
        with path.open("rb") as file:
            prefix = file.read(8)  # safetensors: length of the header, little endian
            header_len = min(int.from_bytes(prefix, "little"), size)
            digest.update(prefix + file.read(header_len))
            for sample in range(_NUM_SAMPLES):
                file.seek(8 + header_len + (size - 8 - header_len) * sample // _NUM_SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    digest.update(f"\n{layout.describe()}\n{quantization}".encode())
    return digest.hexdigest()


def read_config(model_dir: str | Path) -> dict[str, Any]:
    path = Path(model_dir) / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return config


def weight_files(model_dir: str | Path) -> list[Path]:
    """The safetensors files, sorted by name. Raises ConfigError if there are none."""
    files = sorted(Path(model_dir).glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{model_dir}: no *.safetensors file in this directory")
    return files


def _longrope_limit(config: dict[str, Any], positions: int) -> int:
    """Longrope switches all positions of a step at this length, so a batch must stay below it."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type")) != "longrope":
        return positions
    original = "original_max_position_embeddings"
    return int(rope.get(original) or config.get(original) or positions)


def _without_volatile(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_volatile(v) for k, v in value.items() if k not in _VOLATILE_KEYS}
    return value
