"""A model's tokenizer and chat template, without torch.

Agrees with transformers' ``AutoTokenizer`` on plain text and on
``apply_chat_template(add_generation_prompt=True)``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import TemplateError
from tokenizers import decoders
from transformers.utils.chat_template_utils import render_jinja_template

from tandem.errors import ConfigError, InvalidRequest

# The names under which chat templates know a tokenizer's special tokens.
_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class Tokenizer:
    """Text to token ids and back. Immutable once loaded, so threads may share it."""

    def __init__(self, model_dir: str | Path) -> None:
        """Reads tokenizer.json, tokenizer_config.json and chat_template.jinja of a directory."""
        path = Path(model_dir) / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{path}: no such file; the model needs a fast tokenizer")
        self._inner = tokenizers.Tokenizer.from_file(str(path))
        self._inner.no_truncation()
        self._inner.no_padding()
        config = _read_config(Path(model_dir) / "tokenizer_config.json")
        self._chat_template = _chat_template(Path(model_dir), config)
        self._template_tokens = {
            name: _token_text(config[name]) for name in _SPECIAL_TOKENS if config.get(name)
        }

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return int(self._inner.get_vocab_size(with_added_tokens=True))

    @property
    def is_byte_level(self) -> bool:
        """Whether each character of a piece stands for one byte (GPT-2's byte-level BPE)."""
        return isinstance(self._inner.decoder, decoders.ByteLevel)

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        added = self._inner.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    def piece(self, token_id: int) -> str | None:
        """A token as the decoder sees it; None for one that ``decode`` leaves out."""
        if token_id in self._special_ids:
            return None
        piece: str | None = self._inner.id_to_token(token_id)
        return piece

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the special tokens (as BOS) that the model puts around it."""
        ids: list[int] = self._inner.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins.

        Raises ``InvalidRequest`` where the model has no chat template or its template refuses.
        """
        if self._chat_template is None:
            raise InvalidRequest(
                "messages", "this model has no chat template; send text_input or input_ids"
            )
        try:
            (text,), _ = render_jinja_template(
                conversations=[[dict(message) for message in messages]],
                chat_template=self._chat_template,
                add_generation_prompt=True,
                **self._template_tokens,
            )
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            raise InvalidRequest(
                "messages", f"the model's chat template refused them: {error}"
            ) from error
        return self.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out; broken UTF-8 becomes U+FFFD."""
        return str(self._inner.decode(list(token_ids), skip_special_tokens=True))


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    return config


def _chat_template(model_dir: Path, config: Mapping[str, Any]) -> str | None:
    """The default template: chat_template.jinja before tokenizer_config.json, as transformers."""
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _token_text(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])
