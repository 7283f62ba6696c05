"""Starts an engine process, watches it, starts it again, and carries calls to it.

Triton never restarts a dead Python stub, so the stub stays thin and alive and the engine, which
can die of the device, of memory or of a bug, is a child that may be replaced at any time.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from tandem import wire
from tandem.config import EngineConfig
from tandem.errors import ConfigError, EngineDied, to_wire
from tandem.metrics import MetricsBuffer

_MAX_BACKOFF_S = 30.0
_log = logging.getLogger(__name__)
Answer = Callable[[wire.Reply], None]


@dataclass
class _Call:
    answer: Answer
    was_answered: bool = False


class EngineSupervisor:
    """``start``, ``submit`` and ``stop`` belong to Triton's threads; everything else to the thread
    ``engine-supervisor``, which also is the engine's parent (its end would kill the engine).
    """

    def __init__(self, config: EngineConfig, metrics: MetricsBuffer) -> None:
        self._config = config
        self._metrics = metrics
        self._room = threading.Semaphore(config.settings.max_num_seqs)
        self._calls: dict[int, _Call] = {}
        self._next_call_id = 0
        self._totals: dict[str, float] = {}
        self._num_starts = 0
        self._is_stopping = False
        self._failed_starts = 0
        self._up = threading.Event()
        self._settled = threading.Event()  # the first start has succeeded or failed
        self._start_error: str = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="engine-supervisor", daemon=True)

    def start(self) -> None:
        """Returns when the engine is ready; raises ``ConfigError`` if it cannot be."""
        self._thread.start()
        timeout_s = self._config.settings.start_timeout_s
        if not self._settled.wait(timeout_s):
            self._start_error = f"not ready after {timeout_s} s"
        if not self._up.is_set():
            self.stop()
            raise ConfigError(f"engine {self._config.worker}: {self._start_error}")

    def submit(self, spec: bytes, handle: bytes, answer: Answer) -> None:
        """Passes a sequence to the engine as soon as it has room; ``answer`` is called once, from
        another thread. While the engine is being restarted this waits for it.
        """
        self._room.acquire()
        self._loop.call_soon_threadsafe(self._submit, spec, handle, answer)

    def wait_for_room(self) -> None:
        """So that Triton's queue is the queue: the next batch is asked for when it can be used."""
        self._room.acquire()
        self._room.release()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._begin_stop)
            self._thread.join(timeout=20)

    # ---- the supervisor's thread -------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._process: asyncio.subprocess.Process | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._waiting: list[tuple[bytes, bytes, Answer]] = []
        self._context = zmq.asyncio.Context()
        try:
            self._loop.run_until_complete(self._supervise())
        finally:
            self._context.destroy(linger=0)

    async def _supervise(self) -> None:
        while not self._is_stopping:
            started_s = time.monotonic()
            exit_code = await self._run_engine()
            self._up.clear()
            self._metrics.set("tandem_engine_up", 0)
            self._fail_calls(EngineDied(f"engine {self._config.worker} exited with {exit_code}"))
            if self._is_stopping:
                return
            if not self._settled.is_set():
                self._start_error = f"exited with {exit_code} while starting; see its log above"
                self._settled.set()
                return
            lived_s = time.monotonic() - started_s
            self._failed_starts = self._failed_starts + 1 if lived_s < 60 else 0
            backoff_s = min(_MAX_BACKOFF_S, 2.0**self._failed_starts - 1)
            _log.error(
                "engine %s exited with %s; restarting in %.0f s",
                self._config.worker,
                exit_code,
                backoff_s,
            )
            await asyncio.sleep(backoff_s)

    async def _run_engine(self) -> int:
        """One life of the engine, from start to exit; returns its exit code."""
        self._num_starts += 1
        if self._num_starts > 1:
            self._metrics.count("tandem_engine_restarts_total")
        self._totals = {}
        address = f"{self._config.channel}-{self._num_starts}"
        config = _with_channel(self._config, address)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.bind(address)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tandem.engine", stdin=asyncio.subprocess.PIPE
        )
        assert self._process.stdin is not None
        payload = wire.encode(config)
        self._process.stdin.write(len(payload).to_bytes(4, "little") + payload)
        receiving = asyncio.ensure_future(self._receive(self._socket))
        try:
            return await self._process.wait()
        finally:
            receiving.cancel()
            self._socket.close(linger=0)
            self._socket = None
            Path(address.removeprefix("ipc://")).unlink(missing_ok=True)

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            message = wire.decode_from_engine(await socket.recv())
            try:
                self._handle(message)
            except Exception:  # one bad answer must not end the channel
                _log.exception("a message of engine %s was not handled", self._config.worker)

    def _handle(self, message: wire.FromEngine) -> None:
        match message:
            case wire.Reply():
                self._answer(message)
            case wire.Left(call_id=call_id):
                call = self._calls.pop(call_id, None)
                if call is not None:
                    self._room.release()
            case wire.Stats():
                self._publish(message)
            case wire.Ready():
                self._metrics.set("tandem_engine_up", 1)
                self._up.set()
                self._settled.set()
                waiting, self._waiting = self._waiting, []
                for spec, handle, answer in waiting:
                    self._submit(spec, handle, answer)

    def _submit(self, spec: bytes, handle: bytes, answer: Answer) -> None:
        if self._is_stopping:
            error = EngineDied("the server is shutting down")
            self._room.release()
            answer(_error_reply(0, error))
        elif not self._up.is_set() or self._socket is None:
            self._waiting.append((spec, handle, answer))
        else:
            self._next_call_id += 1
            self._calls[self._next_call_id] = _Call(answer)
            submit = wire.Submit(call_id=self._next_call_id, spec=spec, handle=handle)
            self._socket.send(wire.encode(submit))

    def _answer(self, reply: wire.Reply) -> None:
        call = self._calls.get(reply.call_id)
        if call is not None and not call.was_answered:
            call.was_answered = True
            call.answer(reply)

    def _fail_calls(self, error: EngineDied) -> None:
        for call_id in list(self._calls):
            self._answer(_error_reply(call_id, error))
            del self._calls[call_id]
            self._room.release()
        if self._is_stopping or self._failed_starts:
            waiting, self._waiting = self._waiting, []
            for _, _, answer in waiting:
                self._room.release()
                answer(_error_reply(0, error))

    def _publish(self, stats: wire.Stats) -> None:
        for state, count in stats.blocks.items():
            self._metrics.set("tandem_kv_blocks", count, state)
        self._metrics.set("tandem_kv_leases", stats.num_leases)
        self._metrics.set("tandem_running", stats.load.num_running)
        self._metrics.set("tandem_waiting", stats.load.num_waiting)
        self._metrics.set("tandem_waiting_tokens", stats.load.num_waiting_tokens)
        for key, total in stats.totals.items():
            increase = total - self._totals.get(key, 0)
            self._totals[key] = total
            if key in _COUNTERS and increase:
                name, label_value = _COUNTERS[key]
                self._metrics.count(name, increase, label_value)

    def _begin_stop(self) -> None:
        self._is_stopping = True
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            self._loop.call_later(10, self._kill)

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()


_COUNTERS = {
    "leases_released": ("tandem_leases_ended_total", "released"),
    "leases_expired": ("tandem_leases_ended_total", "expired"),
    "pulls_ok": ("tandem_transfers_total", "ok"),
    "pulls_failed": ("tandem_transfers_total", "failed"),
    "pulled_bytes": ("tandem_transfer_bytes_total", ""),
    "steps": ("tandem_steps_total", ""),
    "step_seconds": ("tandem_step_seconds_total", ""),
    "computed_tokens": ("tandem_computed_tokens_total", ""),
    "preemptions": ("tandem_preemptions_total", ""),
}


def _error_reply(call_id: int, error: EngineDied) -> wire.Reply:
    name, message = to_wire(error)
    return wire.Reply(call_id=call_id, error=name, message=message)


def _with_channel(config: EngineConfig, channel: str) -> EngineConfig:
    return msgspec.structs.replace(config, channel=channel)
