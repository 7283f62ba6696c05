"""Every state of a sequence × everything that can end it: all blocks are free, others go on.

The table of docs/failure-matrix.md says which event of a client or a server becomes which of these.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch

from engine_pair import EnginePair
from tandem import wire
from tandem.engine.model import LoadedModel, load_model
from tandem.types import FinishReason
from test_engine_states import assert_at_rest, prefilled
from tiny_models import build_tiny

PROMPT = list(range(3, 103))
LONG = 80  # output tokens: more than any state here lets pass
TTL_S = 30.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    torch.set_num_threads(1)
    return load_model(build_tiny("llama", tmp_path_factory.mktemp("llama")), "float32", "cpu")


# ---- states: each brings a sequence of llm_0_0 there, and returns it --------------------------


def queued(pair: EnginePair) -> wire.SequenceSpec:
    spec = pair.spec(PROMPT)
    pair.submit(pair.prefill, spec)
    assert pair.prefill.blocks["used"] == 0
    return spec


def prefilling(pair: EnginePair) -> wire.SequenceSpec:
    spec = queued(pair)
    pair.prefill.step()
    assert pair.prefill.blocks["used"] > 0
    return spec


def prefilling_locally(pair: EnginePair) -> wire.SequenceSpec:
    spec = pair.spec(PROMPT)
    pair.submit(pair.decode, spec)
    pair.decode.step()
    assert pair.decode.blocks["used"] > 0 and not pair.decode.tokens[spec.sequence_id]
    return spec


def handed_over(pair: EnginePair) -> wire.SequenceSpec:
    spec, _ = prefilled(pair, max_tokens=LONG)
    assert pair.prefill.blocks["leased"] > 0
    return spec


def pulling(pair: EnginePair) -> wire.SequenceSpec:
    spec, handle = prefilled(pair, max_tokens=LONG)
    pair.decode.holds_pulls = True
    pair.submit(pair.decode, spec, handle)
    pair.decode.step()
    assert pair.prefill.blocks["leased"] > 0 and pair.decode.blocks["used"] > 0
    return spec


def pulled(pair: EnginePair) -> wire.SequenceSpec:
    """The bytes are there; the engine has not heard of it."""
    spec = pulling(pair)
    pair.decode.release_pulls()
    return spec


def decoding(pair: EnginePair) -> wire.SequenceSpec:
    spec, handle = prefilled(pair, max_tokens=LONG)
    pair.submit(pair.decode, spec, handle)
    for _ in range(5):
        pair.decode.step()
    assert pair.decode.tokens[spec.sequence_id]
    return spec


def preempted(pair: EnginePair) -> wire.SequenceSpec:
    """The sequences before it take the blocks that its next token needs."""
    specs = [pair.spec([3 + i, *PROMPT, *PROMPT], max_tokens=2 * LONG) for i in range(5)]
    for spec in specs:
        pair.submit(pair.decode, spec)
    for _ in range(200):
        if pair.decode.engine.stats().totals["preemptions"]:
            break
        pair.decode.step()
    else:
        raise AssertionError("nobody was preempted")
    return specs[-1]


def finishing(pair: EnginePair) -> wire.SequenceSpec:
    """Its last token is out."""
    spec = pair.spec(PROMPT, max_tokens=2)
    pair.submit(pair.decode, spec)
    while len(pair.decode.tokens[spec.sequence_id]) < 2:
        pair.decode.step()
    return spec


# ---- events -----------------------------------------------------------------------------------


def is_cancelled(pair: EnginePair, spec: wire.SequenceSpec) -> None:
    """What a cancel, a closed or lost connection and a deadline become: told to all engines."""
    for host in (pair.prefill, pair.decode):
        host.engine.cancel([spec.sequence_id])


def orchestrator_dies(pair: EnginePair, spec: wire.SequenceSpec) -> None:
    """Its heartbeats stop. A lease may be another's by now, so it lasts as long as it was given."""
    for host in (pair.prefill, pair.decode):
        host.engine.orchestrator_gone("llm_0_0")
    pair.clock.now_s += TTL_S + 1


def decode_engine_dies(pair: EnginePair, spec: wire.SequenceSpec) -> None:
    """The orchestrator places the sequence anew, under another id, and cancels this one."""
    pair.decode = pair.replaced(pair.decode)
    pair.prefill.engine.cancel([spec.sequence_id])


def decode_engine_and_orchestrator_die(pair: EnginePair, spec: wire.SequenceSpec) -> None:
    pair.decode = pair.replaced(pair.decode)
    orchestrator_dies(pair, spec)


def prefill_engine_dies(pair: EnginePair, spec: wire.SequenceSpec) -> None:
    pair.prefill = pair.replaced(pair.prefill)


STATES = [
    queued,
    prefilling,
    prefilling_locally,
    handed_over,
    pulling,
    pulled,
    decoding,
    preempted,
    finishing,
]
EVENTS = [
    is_cancelled,
    orchestrator_dies,
    decode_engine_dies,
    decode_engine_and_orchestrator_die,
    prefill_engine_dies,
]


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", STATES)
def test_all_is_free_and_others_go_on(
    model: LoadedModel,
    state: Callable[[EnginePair], wire.SequenceSpec],
    event: Callable[[EnginePair, wire.SequenceSpec], None],
) -> None:
    pair = EnginePair(model, kv_cache_mb=1)
    spec = state(pair)
    event(pair, spec)
    pair.decode.release_pulls()
    neighbour = msgspec.structs.replace(pair.spec(PROMPT[::-1]), reply_to="llm_0_1")
    [got] = pair.serve([neighbour], [True])
    assert got.finish_reason is FinishReason.LENGTH
    alone = EnginePair(model)
    assert got.token_ids == alone.serve([alone.spec(PROMPT[::-1])], [True])[0].token_ids
    assert_at_rest(pair)
