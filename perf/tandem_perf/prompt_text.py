"""Token ids as text that a target tokenizes to exactly as many tokens.

For targets that take text only. Needs the model's tokenizer.json.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from tandem_perf.requests import BenchRequest, Session
from tandem_perf.workloads.base import WorkloadError

_MIN_WORDS = 100


class PromptText:
    """Replaces ids by words, one token each. Equal ids become equal words, so prompts that
    share a prefix of ids share it as text.
    """

    def __init__(self, tokenizer_file: Path) -> None:
        try:
            self._tokenizer = Tokenizer.from_file(str(tokenizer_file))
        except Exception as error:  # the library raises bare Exceptions
            raise WorkloadError(f"tokenizer {tokenizer_file}: {error}") from error
        self._num_special = len(self._tokenizer.encode("").ids)  # e.g. a BOS
        self._words = self._stable_words()
        if len(self._words) < _MIN_WORDS:
            raise WorkloadError(f"tokenizer {tokenizer_file}: too few words of one token")

    def sessions(self, sessions: Iterable[Session]) -> Iterator[Session]:
        for session in sessions:
            requests = tuple(self._request(request) for request in session.requests)
            yield msgspec.structs.replace(session, requests=requests)

    def text(self, ids: array[int]) -> str:
        """Tokenizes to ``len(ids)`` tokens, special ones that the tokenizer adds included."""
        num_words = max(1, len(ids) - self._num_special)
        text = " ".join(self._words[token % len(self._words)] for token in ids[:num_words])
        num_tokens = len(self._tokenizer.encode(text).ids)
        if num_tokens != len(ids):
            raise WorkloadError(f"no text of {len(ids)} tokens: the tokenizer made {num_tokens}")
        return text

    def _request(self, request: BenchRequest) -> BenchRequest:
        if request.input_ids is None:
            return request
        text = self.text(request.input_ids)
        return msgspec.structs.replace(request, input_ids=None, text=text)

    def _stable_words(self) -> list[str]:
        """Words that are one token at the start of a text and after a space."""
        vocabulary = sorted(self._tokenizer.get_vocab().items(), key=lambda item: item[1])
        marked = (token[1:] for token, _ in vocabulary if token[:1] in ("Ġ", "▁"))
        words = [word for word in marked if word.isascii() and word.isalpha()]
        encodings = self._tokenizer.encode_batch(
            [f"{word} {word}" for word in words], add_special_tokens=False
        )
        return [
            word
            for word, encoding in zip(words, encodings, strict=True)
            if len(encoding.ids) == 2
        ]
