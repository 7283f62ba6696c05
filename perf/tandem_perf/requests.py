"""What a workload sends: requests, grouped into sessions, and the digest that identifies them."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec


class BenchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Exactly one of ``input_ids`` (int32), ``text`` and ``messages`` is given.

    ``prompt_tokens`` is 0 where only the target can count them.
    """

    request_id: str
    length_class: str
    max_tokens: int
    input_ids: array[int] | None = None
    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    prompt_tokens: int = 0
    ignore_eos: bool = True

    def content(self) -> bytes:
        """All that reaches a target, in one form for every platform."""
        if self.input_ids is not None:
            prompt = b",".join(b"%d" % token for token in self.input_ids)
        else:
            prompt = msgspec.json.encode([self.text, self.messages], order="sorted")
        head = f"{self.request_id}|{self.length_class}|{self.max_tokens}|{self.ignore_eos}|"
        return head.encode() + prompt


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one user, one after the other: turn k is due ``think_times_s[k]`` after turn
    k−1 ended. Most workloads have sessions of one request.

    ``at_s``: when a trace says that it starts, seconds after the start of the run.
    """

    requests: tuple[BenchRequest, ...]
    think_times_s: tuple[float, ...] = (0.0,)
    at_s: float | None = None


def single(request: BenchRequest, at_s: float | None = None) -> Session:
    return Session(requests=(request,), at_s=at_s)


def first_requests(sessions: Iterable[Session], num_requests: int) -> Iterator[Session]:
    """Sessions with ``num_requests`` requests in all; the last one is cut short if need be."""
    left = num_requests
    for session in sessions:
        if left <= 0:
            return
        yield msgspec.structs.replace(session, requests=session.requests[:left])
        left -= len(session.requests)


class RequestDigest:
    """Two runs sent the same requests if and only if their digests are equal."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self.num_requests = 0

    def watch(self, sessions: Iterable[Session]) -> Iterator[Session]:
        """The same sessions; each is part of the digest from when it was taken."""
        for session in sessions:
            self._hash.update(repr((session.at_s, session.think_times_s)).encode())
            for request in session.requests:
                self._hash.update(request.content())
                self.num_requests += 1
            yield session

    def __str__(self) -> str:
        return self._hash.hexdigest()[:16]
