"""Two tokenizers of a few hundred tokens, written into a model directory without training.

Between them they have every trait that decoding token by token must get right: byte-level BPE (as
GPT-2, Llama-3, Qwen and SmolLM2), and SentencePiece style with spaces as ▁ and byte fallback (as
Llama-2 and Mistral).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INST = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant/user/assistant') }}"
    "{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + ' ' + eos_token }}{% endif %}"
    "{% endfor %}"
)


def write_byte_level(directory: Path) -> None:
    """Byte-level BPE with ChatML: bos ``<|im_start|>``, eos ``<|im_end|>``, pad the same.

    ``<think>`` is an added token that is not special, so it shows in decoded text.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = _merges(["hello", "Ġthe", "Ġworld", "ing", "Ġan", "123", "ðŁĻ", "ĠðŁ"])
    tokenizer = Tokenizer(models.BPE(vocab=_vocab(alphabet, merges), merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False, special=False)])
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    _write(directory, tokenizer, config, eos="<|im_end|>", chat_template=CHATML)


def write_sentencepiece_style(directory: Path) -> None:
    """SentencePiece-style BPE: ▁ for spaces, ``<0xNN>`` byte fallback, ``<s>`` before a text."""
    specials = ["<unk>", "<s>", "</s>"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = ["▁", "\n", *(chr(code) for code in range(0x21, 0x7F)), "é", "你", "好"]
    merges = _merges(["▁hello", "▁the", "▁world", "ing", "▁an", "▁▁▁▁"])
    tokenizer = Tokenizer(
        models.BPE(
            vocab=_vocab([*specials, *byte_tokens, *letters], merges),
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in specials]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    config = {
        "bos_token": {"__type": "AddedToken", "content": "<s>", "special": True},
        "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True},
        "unk_token": {"__type": "AddedToken", "content": "<unk>", "special": True},
    }
    _write(directory, tokenizer, config, eos="</s>", chat_template=INST)


def _merges(words: Sequence[str]) -> list[tuple[str, str]]:
    """The merges that build each word from its left end, each once."""
    pairs = [(word[:end], word[end]) for word in words for end in range(1, len(word))]
    return list(dict.fromkeys(pairs))


def _vocab(tokens: Sequence[str], merges: Sequence[tuple[str, str]]) -> dict[str, int]:
    merged = [left + right for left, right in merges]
    return {token: token_id for token_id, token in enumerate([*tokens, *merged])}


def _write(
    directory: Path, tokenizer: Tokenizer, config: dict[str, Any], eos: str, chat_template: str
) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    # transformers builds some classes anew from their vocabulary; this one takes the file as it is.
    config |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    generation = {
        "eos_token_id": tokenizer.token_to_id(eos),
        "bos_token_id": tokenizer.token_to_id(_content(config["bos_token"])),
        "do_sample": False,
    }
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2))


def _content(value: str | dict[str, Any]) -> str:
    return value if isinstance(value, str) else str(value["content"])
