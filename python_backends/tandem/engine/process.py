"""The engine process: ``python -m tandem.engine``, started and watched by its shim.

The configuration comes as one msgpack message on stdin, which then stays open: its end means that
the shim is gone, and the engine goes with it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO

from tandem import wire
from tandem.config import EngineConfig
from tandem.engine.build import build_engine, export_memory
from tandem.engine.engine_io import EngineIO
from tandem.engine.engine_loop import EngineLoop
from tandem.engine.events import Shutdown
from tandem.engine.lease_timer import LeaseTimer
from tandem.engine.model import load_model
from tandem.engine.model_config import model_fingerprint
from tandem.engine.vital_thread import VitalThread, ends_process
from tandem.errors import ConfigError
from tandem.transport import TransportOptions, create_transport

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
    logging.shutdown()
    os._exit(0)  # all is closed; taking down the interpreter with torch in it can take seconds


def _serve(config: EngineConfig, started_s: float) -> None:
    settings, deployment = config.settings, config.deployment
    loop = EngineLoop()
    signal.signal(signal.SIGTERM, lambda *_: loop.inbox.put(Shutdown()))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; wait for TERM

    _use_device(config.device)
    _log.info("loading %s", deployment.model)
    model = load_model(
        deployment.model,
        settings.dtype,
        config.device,
        settings.quantization,
        settings.max_num_batched_tokens,
    )
    options = TransportOptions(config.device, deployment.kv_host, settings.nixl_backend)
    transport = create_transport(settings.transport, options)
    memory = export_memory(settings, model, transport)
    fingerprint = model_fingerprint(deployment.model, memory.layout, settings.quantization)
    pull_threads = ThreadPoolExecutor(NUM_PULL_THREADS, thread_name_prefix="pull")
    io = EngineIO(config, memory.incarnation, loop.inbox.put)
    engine = build_engine(
        settings,
        model,
        memory,
        worker=config.worker,
        fingerprint=fingerprint,
        secret=deployment.secret,
        outbox=io,
        spawn=pull_threads.submit,
        done=loop.inbox.put,
        may_reply_over_tcp=deployment.is_secret_shared,
    )
    timer = LeaseTimer(memory.board, loop.inbox.put)
    io.start()
    timer.start()
    ready = wire.Ready(
        incarnation=memory.incarnation,
        fingerprint=fingerprint,
        num_blocks=engine.load().num_blocks,
        max_model_len=settings.max_model_len,
        load_s=time.monotonic() - started_s,
    )
    io.to_shim(ready)
    _log.info(
        "ready in %.1f s: %d blocks of %d KiB, %s",
        ready.load_s,
        ready.num_blocks,
        memory.layout.block_bytes // 1024,
        memory.layout.dtype_name,
    )
    with ends_process("the step loop"):
        loop.run(engine, io)
    timer.stop()
    pull_threads.shutdown(wait=True, cancel_futures=True)
    memory.puller.close()
    transport.close()
    io.stop()


def _read_config(stdin: BinaryIO) -> EngineConfig:
    size = int.from_bytes(stdin.read(4), "little")
    return wire.decoder(EngineConfig).decode(stdin.read(size))


def _die_with_parent() -> None:
    """Two ways, because either can fail: the kernel's signal, and the end of the pipe."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        os.read(0, 1)
        os._exit(1)

    VitalThread(watch, name="parent-watch").start()


def _use_cores(config: EngineConfig) -> None:
    """Pins the process before any thread pool exists; then as many torch threads as cores."""
    if config.cores:
        os.sched_setaffinity(0, config.cores)
    import torch
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # the log is no terminal
    num_threads = config.settings.num_threads or len(config.cores)
    torch.set_num_threads(num_threads or max(1, len(os.sched_getaffinity(0)) // 2))


def _use_device(device: str) -> None:
    """The current GPU of this thread, which runs the model: streams and graphs belong to it."""
    import torch

    if device != "cpu":
        torch.cuda.set_device(device)
