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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from tandem import wire
from tandem.config import EngineConfig
from tandem.errors import ConfigError, EngineDied, TandemError, Unavailable, to_wire
from tandem.metrics import MetricsBuffer
from tandem.triton_backend.engine_obituary import Mourners
from tandem.triton_backend.engine_watch import EngineWatch
from tandem.triton_backend.stats_publisher import StatsPublisher

ENGINE_COMMAND = (sys.executable, "-m", "tandem.engine")
_MAX_BACKOFF_S = 30.0
_STABLE_S = 60.0  # an engine that lived shorter counts as a failed start
_HOLD_S = 5.0  # for which an instance without an engine takes no batch; delays a shutdown
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

    def __init__(
        self,
        config: EngineConfig,
        metrics: MetricsBuffer,
        command: Sequence[str] = ENGINE_COMMAND,
        clock: Callable[[], float] = time.monotonic,
        has_siblings: bool = False,  # other instances of the model, which can take its calls
    ) -> None:
        self._config = config
        self._metrics = metrics
        self._command = command
        self._clock = clock
        self._has_siblings = has_siblings
        self._room = threading.Semaphore(config.settings.max_num_seqs)
        self._calls: dict[int, _Call] = {}
        self._waiting: list[tuple[bytes, bytes, Answer]] = []  # for the engine to be up
        self._next_call_id = 0
        self._stats = StatsPublisher(metrics)
        self._mourners = Mourners(config.deployment)
        self._num_starts = 0
        self._failed_starts = 0  # in a row
        self._ready_s = 0.0
        self._incarnation = ""
        self._is_ready = asyncio.Event()  # these three: of the present engine
        self._watch = EngineWatch(config.settings)
        self._kill_reason = ""
        self._process: asyncio.subprocess.Process | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._stopping = asyncio.Event()
        self._up = threading.Event()
        self._settled = threading.Event()  # the first start has succeeded or failed
        self._start_error = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="engine-supervisor", daemon=True)

    def start(self) -> None:
        """Returns when the engine is ready; raises ``ConfigError`` if it cannot be."""
        self._thread.start()
        self._settled.wait(self._config.settings.start_timeout_s + 20)
        if not self._up.is_set():
            self.stop()
            raise ConfigError(f"engine {self._config.worker}: {self._start_error}")

    def submit(self, spec: bytes, handle: bytes, answer: Answer) -> None:
        """Passes a sequence to the engine as soon as it has room; ``answer`` is called once, from
        another thread. While the engine is being restarted this waits for it, unless siblings
        can take the call: then it is refused.
        """
        self._room.acquire()
        try:
            self._loop.call_soon_threadsafe(self._submit, spec, handle, answer)
        except RuntimeError:  # the loop is closed: stopped before
            self._refuse(answer, "the server is shutting down")

    def wait_for_room(self) -> None:
        """So that Triton's queue is the queue: the next batch is asked for when it can be used.
        Without an engine it goes to a sibling.
        """
        self._room.acquire()
        self._room.release()
        if self._has_siblings and not self._stopping.is_set():
            self._up.wait(_HOLD_S)

    def stop(self) -> None:
        """Ends the engine; whatever has no answer yet gets one."""
        if not self._thread.is_alive():
            return
        try:
            self._loop.call_soon_threadsafe(self._begin_stop)
        except RuntimeError:  # the loop is closed: it has just ended by itself
            pass
        self._thread.join(timeout=20)

    # ---- the supervisor's thread -------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._context = zmq.asyncio.Context()
        try:
            self._loop.run_until_complete(self._supervise())
        except Exception as error:  # the thread's boundary: nobody may wait for ever
            _log.exception("the supervisor of engine %s has failed", self._config.worker)
            self._start_error = f"{type(error).__name__}: {error}"
        finally:
            self._settled.set()
            self._context.destroy(linger=0)
            self._loop.close()

    async def _supervise(self) -> None:
        while not self._stopping.is_set():
            end = await self._run_engine()
            was_up = self._up.is_set()
            self._note_end()
            if was_up:
                ended = wire.EngineEnded(
                    worker=self._config.worker, incarnation=self._incarnation, reason=end
                )
                await self._mourners.tell(self._context, ended)
            self._fail_calls(EngineDied(f"engine {self._config.worker} {end}"))
            if not self._settled.is_set():
                self._start_error = f"{end} while starting; see its log above"
                break
            if not was_up or self._failed_starts > 1:  # no telling when there will be an engine
                self._fail_waiting(Unavailable(f"engine {self._config.worker} {end}, again"))
            if not self._stopping.is_set():
                await self._back_off(end)
        self._stopping.set()
        self._fail_waiting(Unavailable("the server is shutting down"))
        await asyncio.sleep(0)  # for a ``submit`` that came meanwhile

    def _note_end(self) -> None:
        was_stable = self._up.is_set() and self._clock() - self._ready_s >= _STABLE_S
        self._failed_starts = 0 if was_stable else self._failed_starts + 1
        self._up.clear()
        self._metrics.set("tandem_engine_up", 0)

    async def _back_off(self, end: str) -> None:
        backoff_s = min(_MAX_BACKOFF_S, 2.0**self._failed_starts - 1)
        _log.error("engine %s %s; restarting in %.0f s", self._config.worker, end, backoff_s)
        try:
            await asyncio.wait_for(self._stopping.wait(), backoff_s)
        except TimeoutError:
            pass

    async def _run_engine(self) -> str:
        """One life of the engine, from start to exit; returns how it ended."""
        self._num_starts += 1
        if self._num_starts > 1:
            self._metrics.count("tandem_engine_restarts_total")
        self._stats.expect_new_engine()
        address = f"{self._config.channel}-{self._num_starts}"
        self._socket = self._context.socket(zmq.DEALER)
        receiving = giving_up = watching = None
        self._watch = EngineWatch(self._config.settings)
        self._is_ready = asyncio.Event()
        self._kill_reason = ""
        try:
            self._socket.bind(address)
            self._process = await self._start_process(address)
            receiving = asyncio.ensure_future(self._receive(self._socket))
            timeout_s = self._config.settings.start_timeout_s
            giving_up = self._loop.call_later(timeout_s, self._give_up_start)
            watching = asyncio.ensure_future(self._kill_what_hangs())
            exit_code = await self._process.wait()
            return self._kill_reason or f"exited with {exit_code}"
        except (OSError, zmq.ZMQError) as error:
            return f"could not be started: {error}"
        finally:
            for task in filter(None, (receiving, watching)):
                task.cancel()
            if giving_up is not None:
                giving_up.cancel()
            self._socket.close(linger=0)
            self._socket = None
            Path(address.removeprefix("ipc://")).unlink(missing_ok=True)

    async def _start_process(self, address: str) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.PIPE
        )
        assert process.stdin is not None
        payload = wire.encode(_with_channel(self._config, address))
        process.stdin.write(len(payload).to_bytes(4, "little") + payload)
        if self._stopping.is_set():  # while the process was being made
            process.terminate()
        return process

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            payload = await socket.recv()
            try:
                self._handle(wire.decode_from_engine(payload))
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
                self._stats.publish(message)
            case wire.Alive():
                self._watch.heard(message)
            case wire.Ready():
                self._incarnation = message.incarnation
                self._metrics.set("tandem_engine_up", 1)
                self._ready_s = self._clock()
                self._is_ready.set()
                self._up.set()
                self._settled.set()
                waiting, self._waiting = self._waiting, []
                for spec, handle, answer in waiting:
                    self._submit(spec, handle, answer)

    def _submit(self, spec: bytes, handle: bytes, answer: Answer) -> None:
        if self._stopping.is_set():
            self._refuse(answer, "the server is shutting down")
        elif self._up.is_set() and self._socket is not None:
            self._next_call_id += 1
            self._calls[self._next_call_id] = _Call(answer)
            submit = wire.Submit(call_id=self._next_call_id, spec=spec, handle=handle)
            self._socket.send(wire.encode(submit))
            self._mourners.note(spec)
        elif self._has_siblings:
            self._refuse(answer, f"engine {self._config.worker} is being restarted")
        else:
            self._waiting.append((spec, handle, answer))

    def _refuse(self, answer: Answer, reason: str) -> None:
        self._room.release()
        _give(answer, _error_reply(0, Unavailable(reason)))

    def _answer(self, reply: wire.Reply) -> None:
        call = self._calls.get(reply.call_id)
        if call is not None and not call.was_answered:
            call.was_answered = True
            _give(call.answer, reply)

    def _fail_calls(self, error: EngineDied) -> None:
        for call_id in list(self._calls):
            self._answer(_error_reply(call_id, error))
            del self._calls[call_id]
            self._room.release()

    def _fail_waiting(self, error: TandemError) -> None:
        waiting, self._waiting = self._waiting, []
        for _, _, answer in waiting:
            self._room.release()
            _give(answer, _error_reply(0, error))

    def _begin_stop(self) -> None:
        self._stopping.set()
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            self._loop.call_later(10, self._kill)

    def _give_up_start(self) -> None:
        if not self._up.is_set():
            self._kill_reason = f"was not ready after {self._config.settings.start_timeout_s} s"
            self._kill()

    async def _kill_what_hangs(self) -> None:
        await self._is_ready.wait()
        self._kill_reason = await self._watch.wait_for_failure()
        if self._stopping.is_set():  # it is silent because it ends; ``_begin_stop`` has a deadline
            return
        _log.error("engine %s %s; killing it", self._config.worker, self._kill_reason)
        self._kill()

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()


def _give(answer: Answer, reply: wire.Reply) -> None:
    try:
        answer(reply)
    except Exception:  # one client's answer must not take those of the others along
        _log.exception("an answer could not be given")


def _error_reply(call_id: int, error: TandemError) -> wire.Reply:
    name, message = to_wire(error)
    return wire.Reply(call_id=call_id, error=name, message=message)


def _with_channel(config: EngineConfig, channel: str) -> EngineConfig:
    return msgspec.structs.replace(config, channel=channel)
