"""The orchestrator's end of the stream plane: one ROUTER socket that every engine connects to.

Tokens come in, one message an engine step; cancels, lease renewals and pings go out. When the shim
of an engine says that it ended, its sequences get an ``EngineDied`` at once. One that is silent for
``worker_timeout_s`` is frozen, or gone with its shim: they get an ``Unavailable``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import zmq
import zmq.asyncio

from tandem import wire
from tandem.errors import EngineDied, TandemError, Unavailable, from_wire
from tandem.orchestrator.stream_listener import Listener
from tandem.types import Load, WorkerLoad

PING_S = 1.0
_RENEW_EVERY_PINGS = 5
_MAX_REMEMBERED_CANCELS = 256
_MAX_REMEMBERED_INCARNATIONS = 256
_log = logging.getLogger(__name__)

StreamEvent = wire.TokenEvent | wire.Prefilled | TandemError


@dataclass
class _Worker:
    """``identity`` and ``load`` are None until its first message has come."""

    name: str
    last_heard_s: float
    identity: bytes | None = None
    load: Load | None = None
    sequences: set[str] = field(default_factory=set)


class TokenStream:
    """The events of one sequence, in the order in which they came."""

    def __init__(self, sequence_id: str) -> None:
        self.sequence_id = sequence_id
        self._events: asyncio.Queue[StreamEvent] = asyncio.Queue()

    def put(self, event: StreamEvent) -> None:
        self._events.put_nowait(event)

    async def get(self) -> wire.TokenEvent | wire.Prefilled:
        """The next event; raises the error that ended the sequence."""
        event = await self._events.get()
        if isinstance(event, TandemError):
            raise event
        return event


class StreamPlane:
    """Owned by the orchestrator's event loop."""

    def __init__(
        self,
        name: str,
        listener: Listener,
        worker_timeout_s: float,
        ping_s: float = PING_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.reply_to = name  # what engines reach it by; changed by ``start``
        self._listener = listener
        self._worker_timeout_s = worker_timeout_s
        self._ping_s = ping_s
        self._clock = clock
        self._workers: dict[str, _Worker] = {}  # by incarnation
        self._gone: deque[str] = deque(maxlen=_MAX_REMEMBERED_INCARNATIONS)
        self._streams: dict[str, TokenStream] = {}
        self._waiting_for_pull: set[str] = set()
        self._cancelled: deque[str] = deque(maxlen=_MAX_REMEMBERED_CANCELS)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.sndhwm = 0
        self._socket.router_handover = True  # an engine that reconnects keeps its identity
        self.reply_to = self._listener.bind(self._context, self._socket)
        self._tasks = [
            asyncio.create_task(self._receive()),
            asyncio.create_task(self._keep_alive()),
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close(linger=200)
        self._listener.close()
        self._context.term()

    @property
    def loads(self) -> list[Load]:
        return [w.load for w in self._workers.values() if w.load is not None]

    @property
    def workers(self) -> list[WorkerLoad]:
        """Every engine that lives, with the newest load it told."""
        return [
            WorkerLoad(w.name, incarnation, w.load, w.last_heard_s)
            for incarnation, w in self._workers.items()
            if w.load is not None
        ]

    def open(self, sequence_id: str) -> TokenStream:
        stream = self._streams[sequence_id] = TokenStream(sequence_id)
        return stream

    def close(self, stream: TokenStream, *, cancel: bool) -> None:
        """No event is wanted any more. With ``cancel`` every engine drops what it holds of it."""
        self._streams.pop(stream.sequence_id, None)
        self._waiting_for_pull.discard(stream.sequence_id)
        for worker in self._workers.values():
            worker.sequences.discard(stream.sequence_id)
        if cancel:
            self._cancelled.append(stream.sequence_id)
            self._broadcast(wire.Cancel(sequence_ids=[stream.sequence_id]))

    def keep_lease(self, stream: TokenStream) -> None:
        """Renews the lease of this sequence's KV until ``admitted`` or ``close``."""
        self._waiting_for_pull.add(stream.sequence_id)

    def admitted(self, stream: TokenStream, worker_name: str, incarnation: str) -> None:
        """The sequence runs on this engine: if the engine dies, so does the stream."""
        self._waiting_for_pull.discard(stream.sequence_id)
        if incarnation in self._gone:
            stream.put(EngineDied(f"engine {worker_name} has ended"))
            return
        # The reply may overtake the engine's first message; if that never comes, it is silent.
        worker = self._workers.setdefault(incarnation, _Worker(worker_name, self._clock()))
        worker.sequences.add(stream.sequence_id)

    async def _receive(self) -> None:
        while True:
            identity, *_, payload = await self._socket.recv_multipart()
            try:
                message = wire.decode_to_orchestrator(payload)
            except msgspec.DecodeError:
                _log.exception("a message of %r cannot be read", identity)
                continue
            if isinstance(message, wire.EngineEnded):
                self._engine_ended(message)
            else:
                self._dispatch(identity, message)

    def _dispatch(self, identity: bytes, message: wire.StepMessage) -> None:
        if message.incarnation in self._gone:
            return  # what it still had in the socket; its streams were told that it is gone
        worker = self._workers.setdefault(message.incarnation, _Worker(message.worker, 0.0))
        is_new = worker.load is None
        worker.identity, worker.load, worker.last_heard_s = identity, message.load, self._clock()
        if is_new:
            self._bury_predecessors(message)
            # What was cancelled while it waited in Triton's queue may reach this engine only now.
            self._send(worker, wire.Cancel(sequence_ids=list(self._cancelled)))
        events: list[wire.TokenEvent | wire.Prefilled] = [*message.prefilled, *message.tokens]
        for event in events:
            stream = self._streams.get(event.sequence_id)
            if stream is not None:
                worker.sequences.add(event.sequence_id)
                stream.put(event)
        for failure in message.failed:
            stream = self._streams.get(failure.sequence_id)
            if stream is not None:
                stream.put(from_wire(failure.error, failure.message))

    async def _keep_alive(self) -> None:
        num_pings = 0
        while True:
            await asyncio.sleep(self._ping_s)
            num_pings += 1
            self._broadcast(wire.Ping())
            if num_pings % _RENEW_EVERY_PINGS == 0 and self._waiting_for_pull:
                self._broadcast(wire.Renew(sequence_ids=list(self._waiting_for_pull)))
            now_s = self._clock()
            for incarnation, worker in list(self._workers.items()):
                silence_s = now_s - worker.last_heard_s
                if silence_s > self._worker_timeout_s:
                    reason = f"worker {worker.name} is silent for {silence_s:.1f} s"
                    self._bury(incarnation, Unavailable(reason))

    def _bury_predecessors(self, hello: wire.StepMessage) -> None:
        """A new incarnation of a worker says hello: what ran on the old one is gone."""
        for incarnation, worker in list(self._workers.items()):
            if worker.name == hello.worker and incarnation != hello.incarnation:
                self._gone.append(incarnation)
                self._bury(incarnation, Unavailable(f"worker {worker.name} was started again"))

    def _engine_ended(self, message: wire.EngineEnded) -> None:
        self._gone.append(message.incarnation)
        if message.incarnation in self._workers:
            reason = f"engine {message.worker} {message.reason}"
            self._bury(message.incarnation, EngineDied(reason))

    def _bury(self, incarnation: str, error: Unavailable) -> None:
        worker = self._workers.pop(incarnation)
        _log.warning("%s; %d sequences were there", error, len(worker.sequences))
        for sequence_id in worker.sequences:
            stream = self._streams.get(sequence_id)
            if stream is not None:
                stream.put(error)

    def _broadcast(self, message: wire.FromOrchestrator) -> None:
        for worker in self._workers.values():
            self._send(worker, message)

    def _send(self, worker: _Worker, message: wire.FromOrchestrator) -> None:
        if worker.identity is not None:
            parts = [worker.identity, wire.encode(message)]
            self._socket.send_multipart(parts, flags=zmq.NOBLOCK)
