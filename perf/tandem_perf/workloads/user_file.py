"""The user's own requests from a JSONL file."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from tandem_perf.requests import BenchRequest, Session, single
from tandem_perf.workloads.base import WorkloadError, WorkloadOptions

TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class UserLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of ``prompt``, ``messages`` and ``input_ids``; ``at_s`` is for ``--arrivals trace``."""

    max_tokens: Annotated[int, msgspec.Meta(ge=1)]
    prompt: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    input_ids: tuple[TokenId, ...] | None = None
    at_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    length_class: str = "all"

    def __post_init__(self) -> None:
        given = [self.prompt, self.messages, self.input_ids]
        if sum(value is not None for value in given) != 1:
            raise ValueError("exactly one of prompt, messages and input_ids is needed")


@dataclass(frozen=True)
class UserFile:
    """In the order of the file, whatever the seed."""

    path: Path
    options: WorkloadOptions

    @property
    def name(self) -> str:
        return f"jsonl:{self.path.name}"

    def sessions(self, seed: int) -> Iterator[Session]:
        decoder = msgspec.json.Decoder(UserLine)
        with self.path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if not text.strip():
                    continue
                try:
                    line = decoder.decode(text)
                except msgspec.MsgspecError as error:
                    raise WorkloadError(f"{self.path}:{number}: {error}") from error
                yield self._session(number, line)

    def _session(self, number: int, line: UserLine) -> Session:
        request = BenchRequest(
            request_id=f"{number}",
            length_class=line.length_class,
            max_tokens=line.max_tokens,
            input_ids=None if line.input_ids is None else array("i", line.input_ids),
            text=line.prompt,
            messages=line.messages,
            prompt_tokens=len(line.input_ids or ()),
            ignore_eos=self.options.ignore_eos,
        )
        at_s = None if line.at_s is None else line.at_s / self.options.speed
        return single(request, at_s=at_s)
