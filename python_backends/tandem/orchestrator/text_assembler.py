"""From tokens to the text a client may see: detokenized, and cut before the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.orchestrator.detokenizer import IncrementalDetokenizer
from tandem.orchestrator.stop_strings import StopStringFilter
from tandem.orchestrator.tokenizer import Tokenizer


class TextAssembler:
    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._filter = StopStringFilter(stop)

    @property
    def has_stopped(self) -> bool:
        return self._filter.matched is not None

    def push(self, token_id: int) -> str:
        """The text that is certain now; may be empty, never part of a character or of a stop."""
        return self._filter.push(self._detokenizer.push([token_id]))

    def finish(self) -> str:
        """What was held back, at the end of the tokens."""
        text = self._filter.push(self._detokenizer.finish())
        return text + self._filter.finish()
