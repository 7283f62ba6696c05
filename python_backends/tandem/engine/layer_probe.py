"""What each layer of a model asks of its attention, found by running it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tandem.engine.attention import AttentionOptions
from tandem.errors import ConfigError, EngineFault


@dataclass(frozen=True)
class LayerProbe:
    """What one layer asks of its attention."""

    num_heads: int  # of queries
    num_kv_heads: int
    head_dim: int
    options: AttentionOptions


def probe_layers(causal_lm: nn.Module, config: Any, device: str) -> list[LayerProbe]:
    """What every layer asks of its attention, from one pass over three tokens.

    Raises ConfigError if a layer needs more than ``PagedAttention`` does, or if they differ.
    """
    probe = _Probe(layer_types(config))
    tokens = torch.arange(3, device=device)[None]
    try:
        with torch.inference_mode():
            causal_lm(input_ids=tokens, position_ids=tokens, use_cache=False, paged_attention=probe)
    except EngineFault as error:
        raise ConfigError(str(error)) from error
    num_layers = config.get_text_config().num_hidden_layers
    if sorted(probe.layers) != list(range(num_layers)):
        raise ConfigError(
            f"{type(causal_lm).__name__}: {len(probe.layers)} of {num_layers} layers use attention"
        )
    if len({(layer.num_kv_heads, layer.head_dim) for layer in probe.layers.values()}) != 1:
        raise ConfigError(f"{type(causal_lm).__name__}: KV heads differ from layer to layer")
    return [probe.layers[layer] for layer in range(num_layers)]


def layer_types(config: Any) -> list[str]:
    return list(getattr(config.get_text_config(), "layer_types", None) or [])


@dataclass
class _Probe:
    """An attention state that computes nothing and notes what each layer asks for."""

    layer_types: list[str]
    layers: dict[int, LayerProbe] = field(default_factory=dict)

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> torch.Tensor:
        layer = getattr(module, "layer_idx", None)
        name = f"{type(module).__name__}, layer {layer}"
        if layer is None:
            raise ConfigError(f"{name}: an attention module without layer_idx")
        if options.get("s_aux") is not None:
            raise ConfigError(f"{name}: attention sinks are not supported")
        if options.get("position_bias") is not None or attention_mask is not None:
            raise ConfigError(f"{name}: position biases and masks of its own are not supported")
        if not (getattr(module, "is_causal", True) and options.get("is_causal") is not False):
            raise ConfigError(f"{name}: its attention is not causal")
        if not query.shape[-1] == key.shape[-1] == value.shape[-1]:
            raise ConfigError(f"{name}: keys and values of different size are not supported")
        is_sliding = self.layer_types[layer : layer + 1] == ["sliding_attention"]
        if is_sliding and options.get("sliding_window") is None:
            raise ConfigError(f"{name}: slides over a window that it does not name")
        scaling = options.get("scaling")
        self.layers[layer] = LayerProbe(
            query.shape[1],
            key.shape[1],
            key.shape[3],
            AttentionOptions(
                query.shape[-1] ** -0.5 if scaling is None else scaling,
                options.get("sliding_window"),
                options.get("softcap"),
            ),
        )
        return torch.zeros_like(query).transpose(1, 2).contiguous()
