"""Traces in the JSONL format that Mooncake (Qin et al., FAST 2025) publishes."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from tandem_perf.requests import BenchRequest, Session, single
from tandem_perf.workloads.base import WorkloadError, WorkloadOptions, generator, length_class
from tandem_perf.workloads.prompts import random_ids

BLOCK_TOKENS = 512  # what one hash id stands for
_HASH_STREAM, _TAIL_STREAM = 1, 2

Count = Annotated[int, msgspec.Meta(ge=1)]
HashId = Annotated[int, msgspec.Meta(ge=0)]


class TraceLine(msgspec.Struct, frozen=True):
    """``timestamp`` in ms since the start of the trace."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Count
    output_length: Count
    hash_ids: tuple[HashId, ...] = ()


@dataclass(frozen=True)
class Mooncake:
    """Equal hash ids become equal blocks of 512 tokens, so the trace's prefix reuse is kept;
    the last block is cut to ``input_length``. What no hash id covers is unique to the request.
    """

    path: Path
    options: WorkloadOptions

    @property
    def name(self) -> str:
        return f"mooncake:{self.path.name}"

    def sessions(self, seed: int) -> Iterator[Session]:
        for number, line in enumerate(read_trace(self.path)):
            limit = self.options.max_prompt_tokens
            if limit is not None and line.input_length > limit:
                continue
            request = BenchRequest(
                request_id=f"{number}",
                length_class=length_class(line.input_length),
                max_tokens=line.output_length,
                input_ids=self._prompt(seed, number, line),
                prompt_tokens=line.input_length,
                ignore_eos=self.options.ignore_eos,
            )
            yield single(request, at_s=line.timestamp / 1000 / self.options.speed)

    def _prompt(self, seed: int, number: int, line: TraceLine) -> array[int]:
        token_range = self.options.token_range
        prompt = array("i")
        for hash_id in line.hash_ids:
            prompt += random_ids(generator(seed, _HASH_STREAM, hash_id), BLOCK_TOKENS, token_range)
        missing = max(0, line.input_length - len(prompt))
        prompt += random_ids(generator(seed, _TAIL_STREAM, number), missing, token_range)
        return prompt[: line.input_length]


def read_trace(path: Path) -> Iterator[TraceLine]:
    """Raises WorkloadError that names the line."""
    decoder = msgspec.json.Decoder(TraceLine)
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                yield decoder.decode(text)
            except msgspec.MsgspecError as error:
                raise WorkloadError(f"{path}:{number}: {error}") from error
