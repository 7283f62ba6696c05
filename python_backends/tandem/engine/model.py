"""Loads any decoder-only transformers model whose attention goes through AttentionInterface."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tandem.engine.attention import ATTENTION_NAME, AttentionOptions, PagedAttention
from tandem.engine.batch import Batch, SequenceSlice
from tandem.engine.decoder import Decoder, has_lean_decoder
from tandem.engine.forward_pass import Forward
from tandem.engine.kernels.native import NativeOperations, native_operations
from tandem.engine.layer_probe import LayerProbe, layer_types, probe_layers
from tandem.engine.linear import MANY_ROWS, LinearPlan
from tandem.engine.model_config import ModelLimits, model_limits, weight_files
from tandem.engine.sequence_attention import SequenceAttention
from tandem.engine.slab import TORCH_DTYPES, empty_slab
from tandem.errors import ConfigError
from tandem.kv.layout import KVLayout
from tandem.types import Quantization

# Of the largest logit: rounding in another order; a layer built otherwise is off by a multiple.
LOGIT_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_QUANTIZED_TOLERANCE = 0.5
_BF16_FLAGS = {"avx512_bf16", "amx_bf16"}  # without them bf16 GEMM is 9x slower than fp32

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, and the shape of its keys and values."""

    forward: Forward
    native: NativeOperations | None  # None: torch computes what lies between the products
    device: torch.device
    dtype_name: str
    num_layers: int
    num_heads: int  # of queries
    num_kv_heads: int
    head_dim: int
    attention_options: tuple[AttentionOptions, ...]  # of each layer
    limits: ModelLimits

    def layout(self, block_size: int) -> KVLayout:
        return KVLayout(
            self.num_layers, self.num_kv_heads, self.head_dim, block_size, self.dtype_name
        )


def load_model(
    model_dir: str | Path,
    dtype_name: str,
    device: str,
    quantization: Quantization = Quantization.NONE,
    max_rows: int = MANY_ROWS,
) -> LoadedModel:
    """Weights from the safetensors of ``model_dir``, for inference only; never downloads.

    ``dtype_name`` "auto": on a GPU the checkpoint's, on CPU bfloat16 if it has the instructions,
    else float32. ``max_rows``: tokens of the largest step; it decides how
    weights are laid out. Raises ConfigError if the model cannot run on paged attention.
    """
    limits = model_limits(model_dir)
    weight_files(model_dir)
    try:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    except (ValueError, OSError, KeyError) as error:
        raise ConfigError(f"{model_dir}: {error}") from error
    _refuse_unsuitable(config)
    dtype_name = resolve_dtype(dtype_name, device, getattr(config, "dtype", None))
    causal_lm = _load_weights(model_dir, config, dtype_name, device)
    layers = probe_layers(causal_lm, config, device)
    native = native_operations(causal_lm.device, TORCH_DTYPES[dtype_name])
    plan = LinearPlan(quantization, max_rows, native)
    forward = None
    if has_lean_decoder(config):
        forward = _lean_forward(causal_lm, layers, plan)
        if forward is None:  # the weights were taken apart
            causal_lm = _load_weights(model_dir, config, dtype_name, device)
    if forward is None:
        plan.replace_all(causal_lm)
        forward = _transformers_forward(causal_lm)
    return LoadedModel(
        forward=forward,
        native=native,
        device=causal_lm.device,
        dtype_name=dtype_name,
        num_layers=len(layers),
        num_heads=layers[0].num_heads,
        num_kv_heads=layers[0].num_kv_heads,
        head_dim=layers[0].head_dim,
        attention_options=tuple(layer.options for layer in layers),
        limits=limits,
    )


def _load_weights(model_dir: str | Path, config: Any, dtype_name: str, device: str) -> Any:
    try:
        causal_lm = AutoModelForCausalLM.from_pretrained(
            model_dir,
            config=config,
            dtype=TORCH_DTYPES[dtype_name],
            attn_implementation=ATTENTION_NAME,
            local_files_only=True,
            use_safetensors=True,
        )
    except (ValueError, OSError, KeyError) as error:
        raise ConfigError(f"{model_dir}: {error}") from error
    if not causal_lm._supports_attention_backend:
        raise ConfigError(
            f"{type(causal_lm).__name__} does not use transformers' AttentionInterface"
        )
    return causal_lm.eval().requires_grad_(False).to(device)


def _transformers_forward(causal_lm: Any) -> Forward:
    def forward(
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        sample_rows: torch.Tensor,
        attention: PagedAttention,
    ) -> torch.Tensor:
        output = causal_lm(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=sample_rows,
            paged_attention=attention,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    return forward


def _lean_forward(causal_lm: Any, layers: list[LayerProbe], plan: LinearPlan) -> Forward | None:
    """The lean decoder, if it computes what transformers does; the weights are its own then."""
    expected = _first_logits(_transformers_forward(causal_lm), causal_lm, layers[0], None)
    options = [layer.options for layer in layers]
    decoder = Decoder(causal_lm, options, plan)
    logits = _first_logits(decoder.forward, causal_lm, layers[0], plan.native)
    difference = ((logits - expected).abs().max() / expected.abs().max()).item()
    is_exact = plan.quantization is Quantization.NONE
    if difference > (LOGIT_TOLERANCE[causal_lm.dtype] if is_exact else _QUANTIZED_TOLERANCE):
        _log.warning(
            "%s: the lean decoder is %.1g off, transformers' modules run instead",
            type(causal_lm).__name__,
            difference,
        )
        return None
    _log.info("lean decoder, %s kernels", "native" if plan.native else "torch")
    return decoder.forward


@torch.inference_mode()
def _first_logits(
    forward: Forward, causal_lm: Any, shape: LayerProbe, native: NativeOperations | None
) -> torch.Tensor:
    """Float logits of a prompt that is longer than a block, then of one more token."""
    num_layers = causal_lm.config.num_hidden_layers
    layout = KVLayout(num_layers, shape.num_kv_heads, shape.head_dim, 16, _name(causal_lm.dtype))
    attention = SequenceAttention(empty_slab(layout, 2, causal_lm.device), native)
    tokens = list(range(1, 22))
    logits = []
    for start, end in ((0, 20), (20, 21)):
        positions = list(range(start, end))
        batch = Batch(
            token_ids=tokens[start:end],
            positions=positions,
            slot_mapping=positions,
            sequences=[SequenceSlice(end - start, end, [0, 1])],
            sample_rows=[end - start - 1],
        )
        attention.start(batch)
        ids, at, rows = (
            torch.tensor(values, device=causal_lm.device)
            for values in (batch.token_ids, batch.positions, batch.sample_rows)
        )
        logits.append(forward(ids, at, rows, attention).float())
    return torch.cat(logits)


def resolve_dtype(dtype_name: str, device: str, checkpoint_dtype: torch.dtype | None) -> str:
    """The dtype of weights and KV cache: ``dtype_name`` itself unless that is "auto"."""
    if dtype_name in TORCH_DTYPES:
        return dtype_name
    if dtype_name != "auto":
        raise ConfigError(f"dtype {dtype_name!r}: not one of auto, {', '.join(TORCH_DTYPES)}")
    if device == "cpu":
        return "bfloat16" if _BF16_FLAGS & _cpu_flags() else "float32"
    return _name(checkpoint_dtype or torch.float32)


def _name(dtype: torch.dtype) -> str:
    return next((name for name, kind in TORCH_DTYPES.items() if kind == dtype), "float32")


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def _refuse_unsuitable(config: Any) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"{config.model_type}: an encoder-decoder model; only decoders are served"
        )
    if not getattr(config, "is_causal", True) or getattr(
        config, "use_bidirectional_attention", False
    ):
        raise ConfigError(f"{config.model_type}: its attention is not causal")
    kinds = set(layer_types(config)) - {"full_attention", "sliding_attention"}
    if kinds:
        raise ConfigError(
            f"{config.model_type}: layers of type {', '.join(sorted(kinds))} are not supported"
        )
