"""Tiny random models with fixed seeds: small enough for a test, with clear argmax gaps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma2Config,
    GemmaConfig,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

SLIDING_WINDOW = 24  # shorter than the contexts of the tests
_GROUPED: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_FAMILIES: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, _GROUPED),
    "qwen3": (Qwen3Config, _GROUPED),
    "mistral": (MistralConfig, _GROUPED | {"sliding_window": SLIDING_WINDOW}),
    "gemma": (GemmaConfig, _GROUPED | {"num_key_value_heads": 1, "head_dim": 32}),
    "gemma2": (
        Gemma2Config,
        _GROUPED
        | {
            "sliding_window": SLIDING_WINDOW,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 30.0,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gpt2": (GPT2Config, {"n_layer": 3, "n_embd": 64, "n_head": 4}),
}
FAMILIES = tuple(_FAMILIES)


def build_tiny(
    family: str,
    directory: str | Path,
    *,
    vocab_size: int = 512,
    max_position_embeddings: int = 512,
    eos_token_id: int | list[int] = 2,
    seed: int = 0,
    **overrides: Any,
) -> Path:
    """Save a random float32 model (config, generation_config, safetensors) into ``directory``.

    ``overrides`` are further fields of the family's transformers config.
    """
    kind, fields = _FAMILIES[family]
    common = {
        "vocab_size": vocab_size,
        "bos_token_id": 1,
        "eos_token_id": eos_token_id,
        "pad_token_id": None,
        "initializer_range": 0.25,
        "tie_word_embeddings": False,
    }
    positions = "n_positions" if family == "gpt2" else "max_position_embeddings"
    config = kind(**(common | {positions: max_position_embeddings} | fields | overrides))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = MODEL_FOR_CAUSAL_LM_MAPPING[kind](config).float().eval()
    model.generation_config = GenerationConfig(
        bos_token_id=1, eos_token_id=eos_token_id, do_sample=False
    )
    model.save_pretrained(directory)
    return Path(directory)
