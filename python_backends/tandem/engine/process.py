"""The engine process: ``python -m tandem.engine``, started and watched by its shim.

The configuration comes as one msgpack message on stdin, which then stays open: its end means that
the shim is gone, and the engine goes with it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import secrets
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO

from tandem import wire
from tandem.config import EngineConfig
from tandem.engine.engine import Engine, EngineLimits
from tandem.engine.engine_io import EngineIO
from tandem.engine.engine_loop import EngineLoop
from tandem.engine.events import Shutdown
from tandem.engine.exports import Exports, Identity
from tandem.engine.imports import Imports
from tandem.engine.lease_timer import LeaseTimer
from tandem.engine.model import LoadedModel, load_model
from tandem.engine.model_config import model_fingerprint
from tandem.engine.model_runner import ModelRunner
from tandem.engine.scheduler import Scheduler
from tandem.engine.slab import slab_tensor
from tandem.errors import ConfigError
from tandem.kv.block_manager import BlockManager
from tandem.kv.layout import KVLayout
from tandem.kv.lease_board import LeaseBoard
from tandem.transport import create_transport
from tandem.transport.base import RegionShape
from tandem.transport.fenced_pull import FencedPuller

NUM_PULL_THREADS = 2
_PR_SET_PDEATHSIG = 1
_log = logging.getLogger(__name__)


def main() -> None:
    started_s = time.monotonic()
    config = _read_config(sys.stdin.buffer)
    _die_with_parent()
    logging.basicConfig(
        level=config.deployment.log_level,
        format=f"%(asctime)s {config.worker} %(levelname)s %(name)s: %(message)s",
    )
    _use_cores(config)
    try:
        _serve(config, started_s)
    except ConfigError as error:
        _log.error("cannot start: %s", error)
        sys.exit(2)


def _serve(config: EngineConfig, started_s: float) -> None:
    settings, deployment = config.settings, config.deployment
    incarnation = secrets.token_hex(8)
    loop = EngineLoop()
    signal.signal(signal.SIGTERM, lambda *_: loop.inbox.put(Shutdown()))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; wait for TERM

    _log.info("loading %s", deployment.model)
    model = load_model(deployment.model, settings.dtype, config.device)
    layout = model.layout(settings.block_size)
    num_blocks = _num_blocks(config, model, layout)
    transport = create_transport(settings.transport)
    shape = RegionShape(num_blocks, layout.block_bytes, num_slots=num_blocks)
    region = transport.export(shape, incarnation)
    slab = slab_tensor(region.slab.data, layout, num_blocks)
    fingerprint = model_fingerprint(deployment.model, layout)
    identity = Identity(incarnation, settings.transport, region.endpoint, fingerprint)

    blocks = BlockManager(num_blocks)
    board = LeaseBoard(region.slots, settings.lease_ttl_s, time.monotonic)
    puller = FencedPuller(transport, region.slab, settings.pull_timeout_s)
    pull_threads = ThreadPoolExecutor(NUM_PULL_THREADS, thread_name_prefix="pull")
    io = EngineIO(config, incarnation, loop.inbox.put)
    timer = LeaseTimer(board, loop.inbox.put)
    engine = Engine(
        worker=config.worker,
        incarnation=incarnation,
        limits=EngineLimits(
            settings.role, settings.block_size, model.limits.vocab_size, settings.max_model_len
        ),
        runner=ModelRunner(model, slab),
        blocks=blocks,
        scheduler=Scheduler(
            blocks, settings.block_size, settings.max_num_seqs, settings.max_num_batched_tokens
        ),
        exports=Exports(identity, deployment.secret, board, blocks),
        imports=Imports(
            identity,
            deployment.secret,
            puller,
            settings.block_size,
            spawn=pull_threads.submit,
            done=loop.inbox.put,
        ),
        outbox=io,
        clock=time.monotonic,
    )
    io.start()
    timer.start()
    ready = wire.Ready(
        incarnation=incarnation,
        fingerprint=fingerprint,
        num_blocks=num_blocks,
        max_model_len=settings.max_model_len,
        load_s=time.monotonic() - started_s,
    )
    io.to_shim(ready)
    _log.info("ready in %.1f s: %d blocks of %d bytes", ready.load_s, num_blocks, shape.block_bytes)
    try:
        loop.run(engine, io)
    finally:
        timer.stop()
        pull_threads.shutdown(wait=True, cancel_futures=True)
        puller.close()
        io.stop()


def _num_blocks(config: EngineConfig, model: LoadedModel, layout: KVLayout) -> int:
    settings = config.settings
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
    if num_blocks < needed:
        needed_mb = -(-needed * layout.block_bytes // 2**20)
        raise ConfigError(
            f"kv_cache_mb = {settings.kv_cache_mb}: one request of max_model_len "
            f"{settings.max_model_len} needs {needed_mb}"
        )
    return num_blocks


def _read_config(stdin: BinaryIO) -> EngineConfig:
    size = int.from_bytes(stdin.read(4), "little")
    return wire.decoder(EngineConfig).decode(stdin.read(size))


def _die_with_parent() -> None:
    """Two ways, because either can fail: the kernel's signal, and the end of the pipe."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _use_cores(config: EngineConfig) -> None:
    """Pins the process before any thread pool exists; then as many torch threads as cores."""
    if config.cores:
        os.sched_setaffinity(0, config.cores)
    import torch

    num_threads = config.settings.num_threads or len(config.cores)
    torch.set_num_threads(num_threads or max(1, len(os.sched_getaffinity(0)) // 2))
