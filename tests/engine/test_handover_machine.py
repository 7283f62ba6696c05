"""Two real engines, a fake model, and everything that can happen between them, in random order.

The fake model's KV names its token and all tokens before it, and the next token depends on the KV
of the whole sequence as it lies in the slab: a block of somebody else, or half of one, anywhere in
a sequence, gives another token than the oracle's.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine_pair import SECRET, EnginePair, Host
from tandem import wire
from tandem.engine.batch import Batch
from tandem.engine.scheduler import Scheduler
from tandem.errors import FenceBroken, InvalidRequest, PullFailed, RequestCancelled
from tandem.kv import handle as kv_handle
from tandem.kv.block_manager import BlockManager
from tandem.kv.layout import KVLayout
from tandem.types import Role

BLOCK_SIZE = 4
NUM_BLOCKS = 16  # of an engine: too few for everybody
VOCAB = 13
MAX_MODEL_LEN = 40
TTL_S = 30.0
_PRIME = (1 << 61) - 1


def kv_of(before: int, token: int) -> int:
    """The KV of a token after one whose KV is ``before``."""
    return (before * 1_000_003 + token + 1) % _PRIME


def next_token(kv: Sequence[int]) -> int:
    return sum(kv) % _PRIME % VOCAB


def oracle(prompt: Sequence[int], count: int) -> list[int]:
    kv: list[int] = []
    output: list[int] = []
    for token in prompt:
        kv.append(kv_of(kv[-1] if kv else 7, token))
    while len(output) < count:
        output.append(next_token(kv))
        kv.append(kv_of(kv[-1], output[-1]))
    return output


class FakeModel:
    device = torch.device("cpu")
    limits = SimpleNamespace(vocab_size=VOCAB, max_position_embeddings=MAX_MODEL_LEN)

    def layout(self, block_size: int) -> KVLayout:
        """Blocks of 64 KiB, of which the KV of this model takes the beginning."""
        return KVLayout(1, 1, 65536 // (2 * 4 * block_size), block_size, "float32")


class FakeRunner:
    def __init__(self, model: FakeModel, slab: torch.Tensor, graph_limits: None) -> None:
        flat = slab.reshape(len(slab), -1).numpy().view(np.int64)
        self._kv = flat[:, :BLOCK_SIZE]  # [num_blocks, block_size]

    def forward(self, batch: Batch) -> torch.Tensor:
        sampled, row = [], 0
        for part in batch.sequences:
            kv = self._kv[part.block_table]  # a copy
            kv = kv.reshape(-1)[: part.context_len].tolist()
            for position in range(part.context_len - part.query_len, part.context_len):
                kv[position] = kv_of(kv[position - 1] if position else 7, batch.token_ids[row])
                block = part.block_table[position // BLOCK_SIZE]
                self._kv[block, position % BLOCK_SIZE] = kv[position]
                row += 1
            if row - 1 in batch.sample_rows:
                sampled.append(next_token(kv))
        return torch.nn.functional.one_hot(torch.tensor(sampled, dtype=torch.long), VOCAB).float()


@dataclass(eq=False)
class Request:
    spec: wire.SequenceSpec
    is_remote: bool
    prefill_call: int = 0
    handle: bytes = b""
    after_first: wire.SequenceSpec | None = None  # what decode gets with the handle
    was_handed_over: bool = False


@dataclass
class Insides:
    """What the invariants look at, of one engine."""

    blocks: BlockManager
    scheduler: Scheduler
    generations: Any = field(default_factory=lambda: np.zeros(NUM_BLOCKS, dtype=np.uint64))
    calls: list[int] = field(default_factory=list)


class HandoverMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.insides: dict[Host, Insides] = {}
        self.requests: list[Request] = []
        with _Fakes() as made:
            self.pair = EnginePair(
                FakeModel(),  # type: ignore[arg-type]
                block_size=BLOCK_SIZE,
                kv_cache_mb=1,
                max_model_len=MAX_MODEL_LEN,
                max_num_batched_tokens=8,
                max_num_seqs=4,
            )
        for host, insides in zip((self.pair.prefill, self.pair.decode), made, strict=True):
            self.insides[host] = insides
            assert len(host.memory.region.slab) == NUM_BLOCKS

    # ---- requests ----------------------------------------------------------------------

    @rule(
        family=st.integers(0, 2),
        length=st.integers(1, 22),
        max_tokens=st.integers(1, 8),
        is_remote=st.booleans(),
        salt=st.sampled_from(["", "", "tenant"]),
        num_steps=st.integers(0, 6),
    )
    def request(
        self,
        family: int,
        length: int,
        max_tokens: int,
        is_remote: bool,
        salt: str,
        num_steps: int,
    ) -> None:
        """Of few families of prompts, so that they share prefixes; and some steps to compute it."""
        prompt = [(family + position * (family + 1)) % VOCAB for position in range(length)]
        spec = self.pair.spec(prompt, max_tokens=max_tokens)
        spec = msgspec.structs.replace(spec, cache_salt=salt)
        request = Request(spec, is_remote)
        if is_remote:
            request.prefill_call = self._submit(self.pair.prefill, spec)
        else:
            self._submit(self.pair.decode, spec)
        self.requests.append(request)
        self.step(self.pair.prefill if is_remote else self.pair.decode, num_steps)

    def prefilled(self) -> list[Request]:
        return [r for r in self.requests if r.handle and not r.was_handed_over]

    @precondition(lambda self: self.prefilled())
    @rule(
        data=st.data(),
        event=st.sampled_from(["nothing", "reuse", "expire", "restart", "break", "renew"]),
        num_steps=st.integers(0, 4),
    )
    def hand_over(self, data: st.DataObject, event: str, num_steps: int) -> None:
        """The event happens in the middle of the next pull, be it this one's or not."""
        request = data.draw(st.sampled_from(self.prefilled()))
        request.was_handed_over = True
        self._happens_during_pull(event)
        assert request.after_first is not None
        self._submit(self.pair.decode, request.after_first, request.handle)
        self.step(self.pair.decode, num_steps)

    @precondition(lambda self: any(r.was_handed_over for r in self.requests))
    @rule(data=st.data(), num_steps=st.integers(0, 4))
    def replay(self, data: st.DataObject, num_steps: int) -> None:
        request = data.draw(st.sampled_from([r for r in self.requests if r.was_handed_over]))
        assert request.after_first is not None
        self._submit(self.pair.decode, request.after_first, request.handle)
        self.step(self.pair.decode, num_steps)

    @precondition(lambda self: self.prefilled())
    @rule(data=st.data())
    def flip_a_bit(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.prefilled()))
        blob = bytearray(request.handle)
        bit = data.draw(st.integers(0, 8 * len(blob) - 1))
        blob[bit // 8] ^= 1 << bit % 8
        self._refused_at_once(request, bytes(blob))

    @precondition(lambda self: self.prefilled())
    @rule(data=st.data(), field=st.sampled_from(["fingerprint", "transport", "num_tokens"]))
    def hand_over_to_another_model(self, data: st.DataObject, field: str) -> None:
        request = data.draw(st.sampled_from(self.prefilled()))
        changed: dict[str, Any] = {"fingerprint": "other", "transport": "pigeon", "num_tokens": 999}
        self._refused_at_once(request, _resigned(request.handle, **{field: changed[field]}))

    @precondition(lambda self: self.prefilled())
    @rule(data=st.data(), what=st.sampled_from(["blocks", "slot", "late", "early", "who"]))
    def signed_but_wrong(self, data: st.DataObject, what: str) -> None:
        """Signed with our secret, as by an exporter that restarted or has a bug."""
        request = data.draw(st.sampled_from(self.prefilled()))
        request.was_handed_over = True
        handle = _verified(request.handle)
        changed: dict[str, dict[str, Any]] = {
            "blocks": {"block_ids": tuple(NUM_BLOCKS + b for b in handle.block_ids)},
            "slot": {"slot": NUM_BLOCKS},
            "late": {"generation": handle.generation + 1},
            "early": {"generation": handle.generation - 1},
            "who": {"incarnation": "0" * 16},
        }
        assert request.after_first is not None
        blob = _resigned(request.handle, **changed[what])
        call_id = self._submit(self.pair.decode, request.after_first, blob)
        decode, sequence_id = self.pair.decode, request.spec.sequence_id
        self._let_pulls_go()
        for _ in range(200):
            if call_id in decode.replies:
                break
            decode.step()
        # All blocks in the local cache: nothing is read but the slot.
        if what != "blocks" or decode.replies[call_id].error:
            error = decode.error(call_id)
            assert isinstance(error, PullFailed | InvalidRequest | RequestCancelled)
            assert decode.tokens[sequence_id] == []

    def _refused_at_once(self, request: Request, blob: bytes) -> None:
        assert request.after_first is not None
        before = self.pair.decode.blocks
        call_id = self._submit(self.pair.decode, request.after_first, blob)
        error = self.pair.decode.error(call_id)
        assert isinstance(error, InvalidRequest | RequestCancelled)
        assert self.pair.decode.blocks == before

    # ---- time and work -----------------------------------------------------------------

    @rule(num_steps=st.integers(1, 4))
    def both_step(self, num_steps: int) -> None:
        self.step(self.pair.prefill, num_steps)
        self.step(self.pair.decode, num_steps)

    def step(self, host: Host, num_steps: int) -> None:
        for _ in range(num_steps):
            host.step()
        self._take_handles()

    @rule(do_hold=st.booleans())
    def pulls_take_time(self, do_hold: bool) -> None:
        if do_hold:
            self.pair.decode.holds_pulls = True
        else:
            self._let_pulls_go()

    @rule(seconds=st.sampled_from([0.01, 10.0, TTL_S + 1]))
    def time_jumps(self, seconds: float) -> None:
        self.pair.clock.now_s += seconds

    # ---- what goes wrong ---------------------------------------------------------------

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        for host in (self.pair.prefill, self.pair.decode):
            host.engine.cancel([request.spec.sequence_id])

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        self.pair.prefill.engine.renew([request.spec.sequence_id])

    @rule()
    def orchestrator_is_silent(self) -> None:
        for host in (self.pair.prefill, self.pair.decode):
            host.engine.orchestrator_gone("llm_0_0")

    @rule(is_lost=st.booleans())
    def releases_are_lost(self, is_lost: bool) -> None:
        self.pair.transport.faults.lose_release = is_lost

    def _happens_during_pull(self, event: str) -> None:
        def happen() -> None:
            self.pair.transport.faults.during_pull = None
            getattr(self, f"_{event}")()

        self.pair.transport.faults.during_pull = happen

    def _nothing(self) -> None:
        pass

    def _reuse(self) -> None:
        """All leases end, and their blocks are computed over."""
        self.pair.prefill.engine.cancel([r.spec.sequence_id for r in self.requests])
        for start in (3, 5):
            prompt = [(start + 2 * position) % VOCAB for position in range(MAX_MODEL_LEN - 10)]
            self._submit(self.pair.prefill, self.pair.spec(prompt, max_tokens=2))
        for _ in range(12):
            self.pair.prefill.step()

    def _expire(self) -> None:
        self.pair.clock.now_s += TTL_S + 1
        self.pair.prefill.step()

    def _renew(self) -> None:
        self.pair.prefill.engine.renew([r.spec.sequence_id for r in self.requests])

    def _break(self) -> None:
        raise MemoryError("the copy ends half-way")

    def _restart(self) -> None:
        self.exporter_restarts()

    @rule()
    def exporter_restarts(self) -> None:
        """Between the issue of a handle and its pull, or during it."""
        old = self.pair.prefill
        old.memory.region.close()
        old.memory.region.slab[:] = 255  # whatever comes to lie there
        for slot in old.memory.region.slots:
            slot["generation"] += 1
        with _Fakes() as made:
            self.pair.prefill = Host(
                Role.PREFILL, old.model, old.transport, old.clock, old.settings
            )
        del self.insides[old]
        self.insides[self.pair.prefill] = made[0]

    # ---- what always holds -------------------------------------------------------------

    @invariant()
    def blocks_are_counted_once(self) -> None:
        for host, inside in self.insides.items():
            inside.blocks.check()
            assert sum(host.blocks.values()) == NUM_BLOCKS

    @invariant()
    def generations_only_grow(self) -> None:
        for host, inside in self.insides.items():
            now = host.memory.region.slots["generation"].copy()
            assert (now >= inside.generations).all()
            inside.generations = now

    @invariant()
    def sequences_share_only_finished_blocks_of_equal_prefixes(self) -> None:
        for inside in self.insides.values():
            scheduler = inside.scheduler
            owner: dict[int, bytes | None] = {}
            for sequence in [*scheduler.pulling, *scheduler.prefilling, *scheduler.decoding]:
                for index, block in enumerate(sequence.block_table):
                    is_full = index < sequence.num_computed // BLOCK_SIZE
                    content = sequence.hashes[index] if is_full else None
                    if block in owner:
                        assert content is not None and owner[block] == content
                    owner[block] = content

    @invariant()
    def every_token_is_the_right_one(self) -> None:
        for request in self.requests:
            spec = request.spec
            events = list(self.pair.decode.tokens[spec.sequence_id])
            if request.after_first is not None:
                assert request.after_first.output_ids[0] == oracle(spec.prompt_ids, 1)[0]
            expected = oracle(spec.prompt_ids, spec.sampling.max_tokens)
            for event in events:
                assert event.token_id == expected[event.position]

    def teardown(self) -> None:
        """Whatever happened: once everybody has left, nothing is held and every call answered."""
        self.pair.transport.faults.during_pull = None
        self._let_pulls_go()
        for host in (self.pair.prefill, self.pair.decode):
            host.run()
        for request in self.requests:
            self.cancel_everywhere(request)
        self.pair.clock.now_s += TTL_S + 1
        for host, inside in self.insides.items():
            host.run()
            assert host.is_empty and host.engine.stats().num_leases == 0
            assert sorted(host.left) == sorted(inside.calls), "each call leaves once"
            assert host.replies.keys() == set(inside.calls), "each call is answered"
        self.every_token_is_the_right_one()

    def cancel_everywhere(self, request: Request) -> None:
        for host in (self.pair.prefill, self.pair.decode):
            host.engine.cancel([request.spec.sequence_id])

    # ---- helpers -----------------------------------------------------------------------

    def _submit(self, host: Host, spec: wire.SequenceSpec, handle: bytes = b"") -> int:
        call_id = self.pair.submit(host, spec, handle)
        self.insides[host].calls.append(call_id)
        return call_id

    def _let_pulls_go(self) -> None:
        self.pair.decode.release_pulls()

    def _take_handles(self) -> None:
        replies = self.pair.prefill.replies
        for request in self.requests:
            if request.after_first is None and request.prefill_call in replies:
                reply = replies[request.prefill_call]
                if reply.error:
                    error = self.pair.prefill.error(request.prefill_call)
                    assert isinstance(error, RequestCancelled)
                    continue
                first = self.pair.prefill.result(request.prefill_call, wire.PrefillReply).token
                request.after_first = msgspec.structs.replace(
                    request.spec, output_ids=(first.token_id,)
                )
                request.handle = reply.handle


class _Fakes:
    """Engines that are built in this context have the fake model, and show their insides."""

    def __enter__(self) -> list[Insides]:
        made: list[Insides] = []

        def scheduler(blocks: BlockManager, *args: Any) -> Scheduler:
            made.append(Insides(blocks, Scheduler(blocks, *args)))
            return made[-1].scheduler

        self._patches = [
            patch("tandem.engine.build.ModelRunner", FakeRunner),
            patch("tandem.engine.build.Scheduler", scheduler),
        ]
        for each in self._patches:
            each.start()
        return made

    def __exit__(self, *exception: object) -> None:
        for each in self._patches:
            each.stop()


def _verified(blob: bytes) -> kv_handle.KVHandle:
    return kv_handle.verify(blob, SECRET, now_unix_s=0)


def _resigned(blob: bytes, **changes: Any) -> bytes:
    return kv_handle.sign(msgspec.structs.replace(_verified(blob), **changes), SECRET)


TestHandoverMachine = HandoverMachine.TestCase
# A few seconds; TANDEM_TEST_EXAMPLES=1000 for a long search.
NUM_EXAMPLES = int(os.environ.get("TANDEM_TEST_EXAMPLES", "60"))
TestHandoverMachine.settings = settings(max_examples=NUM_EXAMPLES, stateful_step_count=40)


class _Last:
    """Draws the newest."""

    def __init__(self, machine: HandoverMachine) -> None:
        self._machine = machine

    def draw(self, strategy: Any) -> Request:
        return self._machine.prefilled()[-1]


@pytest.mark.parametrize("event", ["reuse", "expire", "restart"])
def test_every_torn_read_is_detected(event: str) -> None:
    """Whatever its length, and whether one or all of its blocks changed hands half-way."""
    for length in range(1, 30):
        machine = HandoverMachine()
        machine.request(0, length, 6, True, "", 8)
        machine.hand_over(_Last(machine), event, 4)  # type: ignore[arg-type]
        decode = machine.pair.decode
        assert decode.engine.stats().totals["pulls_failed"] == 1, length
        assert not decode.tokens and isinstance(decode.error(decode.left[0]), FenceBroken)
        machine.teardown()


def test_an_undisturbed_handover_goes_on_with_the_oracles_tokens() -> None:
    for length in range(1, 30):
        machine = HandoverMachine()
        machine.request(1, length, 6, True, "", 8)
        machine.hand_over(_Last(machine), "renew", 8)  # type: ignore[arg-type]
        (events,) = machine.pair.decode.tokens.values()
        expected = oracle(machine.requests[0].spec.prompt_ids, 6)
        assert [event.token_id for event in events] == expected[1:]
        machine.teardown()
