"""Cancel, loss and bad input in every state of a sequence: an answer, and no block left behind."""

from __future__ import annotations

from concurrent.futures import Future

import msgspec
import pytest
import torch

from engine_pair import BLOCK_SIZE, SECRET, EnginePair
from tandem import wire
from tandem.engine.model import LoadedModel, load_model
from tandem.errors import (
    FenceBroken,
    InvalidHandle,
    InvalidRequest,
    PullFailed,
    RequestCancelled,
)
from tandem.kv import handle as kv_handle
from tandem.types import SamplingParams
from tiny_models import build_tiny

PROMPT = list(range(3, 103))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> LoadedModel:
    torch.set_num_threads(1)
    return load_model(build_tiny("llama", tmp_path_factory.mktemp("llama")), "float32", "cpu")


@pytest.fixture
def pair(model: LoadedModel) -> EnginePair:
    return EnginePair(model)


def prefilled(pair: EnginePair, **sampling: object) -> tuple[wire.SequenceSpec, bytes]:
    """A sequence whose KV waits behind a handle, as it goes to decode."""
    spec = pair.spec(PROMPT, **sampling)
    call_id = pair.submit(pair.prefill, spec)
    pair.prefill.run()
    token = pair.prefill.result(call_id, wire.PrefillReply).token
    after_first = wire.SequenceSpec(
        sequence_id=spec.sequence_id,
        reply_to=spec.reply_to,
        prompt_ids=spec.prompt_ids,
        output_ids=(token.token_id,),
        sampling=spec.sampling,
    )
    return after_first, pair.prefill.replies[call_id].handle


def assert_at_rest(pair: EnginePair) -> None:
    pair.prefill.run()
    pair.decode.run()
    for host in (pair.prefill, pair.decode):
        assert host.is_empty
        assert host.engine.stats().num_leases == 0
        assert host.engine.load().num_running == host.engine.load().num_waiting == 0


def test_cancel_before_it_arrives(pair: EnginePair) -> None:
    spec = pair.spec(PROMPT)
    pair.prefill.engine.cancel([spec.sequence_id])
    call_id = pair.submit(pair.prefill, spec)
    assert isinstance(pair.prefill.error(call_id), RequestCancelled)
    assert pair.prefill.left == [call_id]
    assert_at_rest(pair)


def test_cancel_while_queued(pair: EnginePair) -> None:
    spec = pair.spec(PROMPT)
    call_id = pair.submit(pair.prefill, spec)
    pair.prefill.engine.cancel([spec.sequence_id])
    assert isinstance(pair.prefill.error(call_id), RequestCancelled)
    assert pair.prefill.left == [call_id]
    assert_at_rest(pair)


def test_cancel_mid_prefill(pair: EnginePair) -> None:
    spec = pair.spec(PROMPT)
    call_id = pair.submit(pair.prefill, spec)
    pair.prefill.step()
    assert pair.prefill.blocks["used"] > 0
    pair.prefill.engine.cancel([spec.sequence_id])
    assert isinstance(pair.prefill.error(call_id), RequestCancelled)
    assert_at_rest(pair)


def test_cancel_after_the_handle_was_issued(pair: EnginePair) -> None:
    spec, handle = prefilled(pair)
    assert pair.prefill.blocks["leased"] > 0
    pair.prefill.engine.cancel([spec.sequence_id])
    assert pair.prefill.is_empty
    call_id = pair.submit(pair.decode, spec, handle)
    pair.decode.run()
    assert isinstance(pair.decode.error(call_id), FenceBroken)
    assert_at_rest(pair)


def test_cancel_while_pulling_keeps_the_blocks_until_the_pull_ends(pair: EnginePair) -> None:
    spec, handle = prefilled(pair)
    pair.decode.holds_pulls = True
    call_id = pair.submit(pair.decode, spec, handle)
    pair.decode.step()
    pair.decode.engine.cancel([spec.sequence_id])
    assert isinstance(pair.decode.error(call_id), RequestCancelled)
    assert pair.decode.blocks["used"] > 0, "bytes may still be landing in them"
    pair.decode.release_pulls()
    assert_at_rest(pair)


def test_cancel_while_decoding(pair: EnginePair) -> None:
    spec, handle = prefilled(pair, max_tokens=100)
    pair.submit(pair.decode, spec, handle)
    for _ in range(5):
        pair.decode.step()
    assert pair.decode.tokens[spec.sequence_id]
    pair.decode.engine.cancel([spec.sequence_id])
    num_tokens = len(pair.decode.tokens[spec.sequence_id])
    assert_at_rest(pair)
    assert len(pair.decode.tokens[spec.sequence_id]) == num_tokens


def test_cancel_of_a_finished_sequence_changes_nothing(pair: EnginePair) -> None:
    spec = pair.spec(PROMPT)
    pair.serve([spec], [True])
    pair.prefill.engine.cancel([spec.sequence_id])
    pair.decode.engine.cancel([spec.sequence_id])
    assert_at_rest(pair)


def test_a_lost_orchestrator_takes_its_sequences_along(pair: EnginePair) -> None:
    specs = [pair.spec(PROMPT, max_tokens=100) for _ in range(3)]
    for spec in specs:
        pair.submit(pair.decode, spec)
    pair.decode.step()
    pair.decode.engine.orchestrator_gone("llm_0_0")
    assert_at_rest(pair)


def test_an_expired_lease_frees_its_blocks_and_fences_the_puller(pair: EnginePair) -> None:
    spec, handle = prefilled(pair)
    pair.clock.now_s += 29
    pair.prefill.engine.renew([spec.sequence_id])
    pair.clock.now_s += 29
    pair.prefill.run()
    assert pair.prefill.blocks["leased"] > 0, "renewed"
    pair.clock.now_s += 2
    pair.prefill.run()
    assert pair.prefill.is_empty
    call_id = pair.submit(pair.decode, spec, handle)
    pair.decode.run()
    assert isinstance(pair.decode.error(call_id), FenceBroken)
    assert pair.prefill.engine.stats().totals["leases_expired"] == 1
    assert_at_rest(pair)


def test_blocks_reused_during_the_pull_are_never_decoded(pair: EnginePair) -> None:
    spec, handle = prefilled(pair)
    newcomer = pair.spec(list(range(400, 500)))

    def reuse() -> None:
        pair.prefill.engine.cancel([spec.sequence_id])
        pair.submit(pair.prefill, newcomer)
        pair.prefill.step()

    pair.transport.faults.during_pull = reuse
    call_id = pair.submit(pair.decode, spec, handle)
    pair.decode.run()
    assert isinstance(pair.decode.error(call_id), FenceBroken)
    assert not pair.decode.tokens[spec.sequence_id]
    pair.prefill.run()
    pair.prefill.engine.cancel([newcomer.sequence_id])
    assert_at_rest(pair)


def test_a_failed_pull_is_answered_and_counted(pair: EnginePair) -> None:
    spec, handle = prefilled(pair)
    pair.transport.faults.pull_error = "the link is cut"
    call_id = pair.submit(pair.decode, spec, handle)
    pair.decode.run()
    assert isinstance(pair.decode.error(call_id), PullFailed)
    assert pair.decode.engine.stats().totals["pulls_failed"] == 1
    assert pair.decode.left == [call_id]
    pair.prefill.engine.cancel([spec.sequence_id])
    assert_at_rest(pair)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_blocks_of_a_pull_that_timed_out_are_kept_until_nothing_can_land(
    pair: EnginePair, is_cancelled: bool
) -> None:
    spec, handle = prefilled(pair)
    under_way: Future[None] = Future()
    pair.transport.faults.timed_out = under_way
    pair.decode.holds_pulls = is_cancelled
    call_id = pair.submit(pair.decode, spec, handle)
    pair.decode.step()
    if is_cancelled:
        pair.decode.engine.cancel([spec.sequence_id])
        pair.decode.release_pulls()
    pair.decode.run()
    error = pair.decode.error(call_id)
    assert isinstance(error, RequestCancelled if is_cancelled else PullFailed)
    assert pair.decode.left == [call_id]
    assert pair.decode.blocks["used"] > 0, "bytes may still be landing in them"
    under_way.set_exception(PullFailed("the peer died"))
    pair.prefill.engine.cancel([spec.sequence_id])
    assert_at_rest(pair)
    assert pair.decode.engine.stats().totals["pulls_failed"] == 1


def test_a_handle_is_consumed_once(pair: EnginePair) -> None:
    spec, handle = prefilled(pair)
    pair.submit(pair.decode, spec, handle)
    pair.decode.run()
    assert pair.decode.tokens[spec.sequence_id]
    replay = pair.submit(pair.decode, spec, handle)
    pair.decode.run()
    assert isinstance(pair.decode.error(replay), FenceBroken)
    assert_at_rest(pair)


@pytest.mark.parametrize("cut", [0, 1, 40])
def test_a_forged_or_truncated_handle_allocates_nothing(pair: EnginePair, cut: int) -> None:
    spec, handle = prefilled(pair)
    blob = handle[:-cut] if cut else handle[:50] + b"\x00" + handle[51:]
    call_id = pair.submit(pair.decode, spec, blob)
    assert isinstance(pair.decode.error(call_id), InvalidHandle)
    assert pair.decode.blocks["free"] == sum(pair.decode.blocks.values())
    assert pair.decode.left == [call_id]


def test_a_handle_of_another_sequence_is_refused(pair: EnginePair) -> None:
    _, handle = prefilled(pair)
    other, _ = prefilled(pair)
    call_id = pair.submit(pair.decode, other, handle)
    assert isinstance(pair.decode.error(call_id), InvalidHandle)


def test_a_handle_with_other_tokens_is_refused(pair: EnginePair) -> None:
    spec, handle = prefilled(pair)
    longer = wire.SequenceSpec(
        sequence_id=spec.sequence_id,
        reply_to=spec.reply_to,
        prompt_ids=(*spec.prompt_ids, 5),
        output_ids=spec.output_ids,
        sampling=spec.sampling,
    )
    call_id = pair.submit(pair.decode, longer, handle)
    assert isinstance(pair.decode.error(call_id), InvalidHandle)


def test_signed_block_ids_out_of_range_move_no_byte(pair: EnginePair) -> None:
    """A handle may be ours and still be wrong, if the exporter restarted with another slab."""
    spec, blob = prefilled(pair)
    handle = kv_handle.verify(blob, SECRET, now_unix_s=0)
    beyond = tuple(block + 10**6 for block in handle.block_ids)
    fields = {name: getattr(handle, name) for name in handle.__struct_fields__}
    forged = kv_handle.sign(kv_handle.KVHandle(**(fields | {"block_ids": beyond})), SECRET)
    call_id = pair.submit(pair.decode, spec, forged)
    pair.decode.run()
    assert isinstance(pair.decode.error(call_id), PullFailed)
    assert pair.decode.is_empty


def test_bad_requests_name_the_field(pair: EnginePair) -> None:
    good = dict(
        sequence_id="s",
        reply_to="llm_0_0",
        prompt_ids=(5, 6),
        sampling=SamplingParams(max_tokens=1),
    )
    bad = {
        "prompt_ids": [(), (512,), (-1,), (5,) * 512],
        "request": [b"", b"\x80", b"\xff" * 100],
        "reply_to": ["../../etc/passwd", "", "x" * 200],
    }
    for field, values in bad.items():
        for value in values:
            payload = value if field == "request" else {**good, field: value}
            spec = payload if isinstance(payload, bytes) else encoded(payload)
            pair.decode.engine.submit(wire.Submit(call_id=99, spec=spec))
            error = pair.decode.error(99)
            assert isinstance(error, InvalidRequest)
            assert field in str(error)
            del pair.decode.replies[99]
    assert not pair.decode.met
    assert_at_rest(pair)


def encoded(fields: dict[str, object]) -> bytes:
    return msgspec.msgpack.encode(fields)


def test_the_same_sequence_twice_is_refused(pair: EnginePair) -> None:
    spec = pair.spec(PROMPT)
    pair.submit(pair.decode, spec)
    second = pair.submit(pair.decode, spec)
    assert isinstance(pair.decode.error(second), InvalidRequest)
    pair.decode.engine.cancel([spec.sequence_id])
    assert_at_rest(pair)


def test_a_prefill_engine_takes_no_handle(pair: EnginePair) -> None:
    spec, handle = prefilled(pair)
    call_id = pair.submit(pair.prefill, spec, handle)
    assert isinstance(pair.prefill.error(call_id), InvalidRequest)


def test_prompts_do_not_overtake_each_other_in_blocks(model: LoadedModel) -> None:
    """More prompts than the slab holds: they wait for leases to end, and none is lost."""
    pair = EnginePair(model, kv_cache_mb=1, max_model_len=512)
    capacity = 2**20 // model.layout(BLOCK_SIZE).block_bytes * BLOCK_SIZE
    specs = [pair.spec([3 + i, *PROMPT * 2]) for i in range(12)]
    assert sum(len(s.prompt_ids) for s in specs) > capacity
    outputs = pair.serve(specs, [True] * 12)
    assert all(len(output.token_ids) == 8 for output in outputs)
    assert_at_rest(pair)
