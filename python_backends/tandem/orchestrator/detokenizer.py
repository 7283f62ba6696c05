"""Text of a token stream, piece by piece, without ever showing what later tokens could change.

What is pushed out, joined, equals ``tokenizer.decode`` of all ids, for every sequence of ids. Two
ways, by the tokenizer's decoder:

- Byte-level BPE: each token is a few bytes and the text is their UTF-8 decoding, so an incremental
  UTF-8 decoder is exact, also for long runs of broken bytes.
- Everything else (SentencePiece style and unknown decoders): decode a window of the shown token
  before the new ones, and take what the new ones add. A run of byte-fallback tokens is held until
  it ends, since one bad byte turns the whole run into U+FFFD.

``tokenizers.decoders.DecodeStream`` is not used: it has no flush at the end, and with byte fallback
it raises "Invalid prefix encountered" as soon as a run of bytes that it has already shown goes bad.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import Protocol

from tandem.orchestrator.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "\ufffd"


class _Decoder(Protocol):
    def add(self, token_id: int, piece: str) -> str: ...

    def flush(self) -> str: ...


class IncrementalDetokenizer:
    """The text of one sequence, as its tokens come. Costs O(1) per token, amortised."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder: _Decoder = (
            _ByteLevelDecoder() if tokenizer.is_byte_level else _WindowDecoder(tokenizer)
        )

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is now certain; special tokens and unknown ids have none."""
        texts: list[str] = []
        for token_id in token_ids:
            piece = self._tokenizer.piece(token_id)
            if piece is not None:
                texts.append(self._decoder.add(token_id, piece))
        return "".join(texts)

    def finish(self) -> str:
        """The rest, where an incomplete character shows as U+FFFD; nothing may be pushed after."""
        return self._decoder.flush()


class _ByteLevelDecoder:
    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token_id: int, piece: str) -> str:
        return self._utf8.decode(_bytes_of(piece))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """Invariant: ``_context`` is shown, ``_pending`` is not, and what came before ``_context``
    changes nothing about how the tokens after it decode.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._pending: list[int] = []

    def add(self, token_id: int, piece: str) -> str:
        self._pending.append(token_id)
        if _BYTE_TOKEN.fullmatch(piece):
            return ""
        text = self._new_text()
        if text.endswith(_REPLACEMENT) and _REPLACEMENT not in piece:
            return ""  # an incomplete character of a decoder that joins bytes
        self._show()
        return text

    def flush(self) -> str:
        return self._new_text()

    def _new_text(self) -> str:
        shown = self._tokenizer.decode(self._context)
        return self._tokenizer.decode(self._context + self._pending)[len(shown) :]

    def _show(self) -> None:
        """Moves the window: the context is the shortest tail that has text.

        A tail without text (or only the space that decoders strip from a start) would make the
        next token look like the first of the sequence.
        """
        tokens = self._context + self._pending
        length = 1
        while length < len(tokens) and not self._tokenizer.decode(tokens[-length:]):
            length += 1
        self._context, self._pending = tokens[-length:], []


def _byte_of_char() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 stands for itself, other bytes for U+0100 and on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


_BYTE_OF_CHAR = _byte_of_char()


def _bytes_of(piece: str) -> bytes:
    """The bytes of a byte-level piece; an added token with other characters is plain text."""
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in piece])
    except KeyError:
        return piece.encode()
