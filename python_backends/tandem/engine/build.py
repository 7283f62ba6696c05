"""Puts an engine together from its configuration and a loaded model."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from tandem.config import EngineSettings
from tandem.engine.admission import EngineLimits
from tandem.engine.engine import Engine
from tandem.engine.exports import Exports, Identity
from tandem.engine.imports import Imports, PullDone, PullSettled
from tandem.engine.model import LoadedModel
from tandem.engine.model_runner import DecodeLimits, ModelRunner
from tandem.engine.outbox import Outbox
from tandem.engine.scheduler import Scheduler
from tandem.engine.slab import tensor_of
from tandem.errors import ConfigError
from tandem.kv.block_manager import BlockManager
from tandem.kv.layout import KVLayout
from tandem.kv.lease_board import LeaseBoard
from tandem.transport.base import Region, RegionShape, Transport
from tandem.transport.fenced_pull import FencedPuller
from tandem.types import Role


@dataclass(frozen=True)
class EngineMemory:
    """The slab of one engine, exported under a new incarnation."""

    incarnation: str
    layout: KVLayout
    region: Region
    board: LeaseBoard
    puller: FencedPuller


def export_memory(
    settings: EngineSettings,
    model: LoadedModel,
    transport: Transport,
    clock: Callable[[], float] = time.monotonic,
) -> EngineMemory:
    incarnation = secrets.token_hex(8)
    layout = model.layout(settings.block_size)
    num_blocks = _num_blocks(settings, model, layout)
    # A lease holds at least one block, so the board can never be full.
    shape = RegionShape(num_blocks, layout.block_bytes, num_slots=num_blocks)
    region = transport.export(shape, incarnation)
    return EngineMemory(
        incarnation=incarnation,
        layout=layout,
        region=region,
        board=LeaseBoard(region.slots, settings.lease_ttl_s, clock),
        puller=FencedPuller(transport, region.slab, settings.pull_timeout_s),
    )


def build_engine(
    settings: EngineSettings,
    model: LoadedModel,
    memory: EngineMemory,
    *,
    worker: str,
    fingerprint: str,
    secret: bytes,
    outbox: Outbox,
    spawn: Callable[[Callable[[], None]], object],
    done: Callable[[PullDone | PullSettled], None],
    clock: Callable[[], float] = time.monotonic,
    may_reply_over_tcp: bool = False,
) -> Engine:
    num_scratch = _num_scratch_blocks(settings, model)
    blocks = BlockManager(len(memory.region.slab) - num_scratch)
    graph_limits = DecodeLimits(settings.max_num_seqs, settings.max_model_len)
    endpoint = memory.region.endpoint
    identity = Identity(memory.incarnation, settings.transport, endpoint, fingerprint)
    return Engine(
        worker=worker,
        incarnation=memory.incarnation,
        limits=EngineLimits(
            settings.role,
            settings.block_size,
            model.limits.vocab_size,
            settings.max_model_len,
            may_reply_over_tcp,
        ),
        runner=ModelRunner(
            model,
            tensor_of(memory.region.slab, memory.layout),
            graph_limits if num_scratch else None,
        ),
        blocks=blocks,
        scheduler=Scheduler(
            blocks,
            settings.block_size,
            settings.max_num_seqs,
            settings.max_num_batched_tokens,
            settings.max_itl_ms / 1e3,
        ),
        exports=Exports(identity, secret, memory.board, blocks),
        imports=Imports(identity, secret, memory.puller, settings.block_size, spawn, done),
        outbox=outbox,
        clock=clock,
    )


def _num_blocks(settings: EngineSettings, model: LoadedModel, layout: KVLayout) -> int:
    if settings.max_model_len > model.limits.max_position_embeddings:
        raise ConfigError(
            f"max_model_len = {settings.max_model_len}: the model has "
            f"{model.limits.max_position_embeddings} positions"
        )
    if settings.max_num_seqs > settings.max_num_batched_tokens:
        raise ConfigError(
            f"max_num_seqs = {settings.max_num_seqs}: must not exceed max_num_batched_tokens "
            f"({settings.max_num_batched_tokens}), every sequence decodes one token a step"
        )
    num_blocks = layout.num_blocks_in(settings.kv_cache_mb * 2**20)
    needed = -(-settings.max_model_len // settings.block_size)
    needed += _num_scratch_blocks(settings, model)
    if num_blocks < needed:
        needed_mb = -(-needed * layout.block_bytes // 2**20)
        raise ConfigError(
            f"kv_cache_mb = {settings.kv_cache_mb}: one request of max_model_len "
            f"{settings.max_model_len} needs {needed_mb}"
        )
    return num_blocks


def _num_scratch_blocks(settings: EngineSettings, model: LoadedModel) -> int:
    """At the end of the slab, for the padding of decode graphs."""
    return int(model.device.type == "cuda" and settings.role is Role.DECODE)
