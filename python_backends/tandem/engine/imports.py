"""What this engine takes from others: handles are verified first, then their blocks are pulled."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from tandem.engine.exports import Identity
from tandem.engine.sequence import Sequence
from tandem.errors import InvalidHandle, PullFailed, PullTimedOut
from tandem.kv import handle as kv_handle
from tandem.kv.handle import KVHandle
from tandem.transport.fenced_pull import FencedPuller, PullResult
from tandem.wire import SequenceSpec

_KEEP = 0.8  # of what the pulls before weigh in the rate


@dataclass(frozen=True)
class PullDone:
    """A pull came to its end; without a ``result`` the blocks hold nothing. Unless it is settled,
    bytes may still land in them; a ``PullSettled`` follows.
    """

    sequence: Sequence
    result: PullResult | None = None
    error: PullFailed | None = None
    is_settled: bool = True


@dataclass(frozen=True)
class PullSettled:
    """Nothing of a pull that was given up can land any more: its blocks can be used again."""

    sequence: Sequence


class Imports:
    """``spawn`` runs a pull beside the engine loop; ``done`` brings its end back to the loop."""

    def __init__(
        self,
        identity: Identity,
        secret: bytes,
        puller: FencedPuller,
        block_size: int,
        spawn: Callable[[Callable[[], None]], object],
        done: Callable[[PullDone | PullSettled], None],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._identity = identity
        self._secret = secret
        self._puller = puller
        self._block_size = block_size
        self._spawn = spawn
        self._done = done
        self._wall_clock = wall_clock
        self._recent_tokens = self._recent_s = 0.0

    @property
    def pull_tokens_per_s(self) -> float:
        """Of the last pulls; 0 before the first one."""
        return self._recent_tokens / self._recent_s if self._recent_s else 0.0

    def note_rate(self, num_tokens: int, seconds: float) -> None:
        """A pull of so many tokens took so long."""
        self._recent_tokens = _KEEP * self._recent_tokens + num_tokens
        self._recent_s = _KEEP * self._recent_s + seconds

    def verify(self, blob: bytes, spec: SequenceSpec) -> KVHandle:
        """The handle of ``spec``'s KV, or ``InvalidHandle``; nothing has been allocated yet."""
        handle = kv_handle.verify(blob, self._secret, now_unix_s=self._wall_clock())
        if handle.transport != self._identity.transport:
            raise InvalidHandle(f"transport {handle.transport}, here {self._identity.transport}")
        if handle.fingerprint != self._identity.fingerprint:
            raise InvalidHandle(
                f"model or KV layout {handle.fingerprint}, here {self._identity.fingerprint}"
            )
        if handle.sequence_id != spec.sequence_id:
            raise InvalidHandle(f"issued for sequence {handle.sequence_id}, not this one")
        num_known = len(spec.prompt_ids) + len(spec.output_ids)
        if handle.num_tokens != num_known - 1 or spec.output_ids[-1:] != (handle.first_token,):
            raise InvalidHandle(
                f"holds {handle.num_tokens} tokens and then token {handle.first_token}, which is "
                f"not this sequence of {num_known} tokens"
            )
        if len(handle.block_ids) != -(-handle.num_tokens // self._block_size):
            raise InvalidHandle(
                f"{len(handle.block_ids)} blocks of {self._block_size} for "
                f"{handle.num_tokens} tokens"
            )
        return handle

    def start(self, sequence: Sequence) -> None:
        """Pulls the blocks that the local prefix cache did not have."""
        handle = sequence.handle
        assert handle is not None
        first = sequence.num_cached // self._block_size
        remote = handle.block_ids[first:]
        local = sequence.block_table[first : len(handle.block_ids)]

        def run() -> None:
            try:
                result = self._puller.pull(handle, remote, local)
            except PullTimedOut as error:
                self._done(PullDone(sequence, error=error, is_settled=False))
                error.settled.add_done_callback(lambda _: self._done(PullSettled(sequence)))
            except PullFailed as error:
                self._done(PullDone(sequence, error=error))
            except Exception as error:  # a thread's boundary: nothing may wait for ever
                self._done(PullDone(sequence, error=PullFailed(f"{type(error).__name__}: {error}")))
            else:
                self._done(PullDone(sequence, result=result))

        self._spawn(run)
