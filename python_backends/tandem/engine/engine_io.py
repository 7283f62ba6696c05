"""The engine's sockets, all in one thread, so that heartbeats and cancels flow during a step.

::

    engine loop ──inproc──▶ EngineIO ──DEALER──▶ shim            Ready, Alive, Reply, Left, Stats
                                     ──DEALER──▶ orchestrators   StepMessage
    engine loop ◀───queue── EngineIO ◀────────── shim            Submit
                                     ◀────────── orchestrators   Cancel, Renew, Ping
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import zmq

from tandem import wire
from tandem.config import EngineConfig, EngineSettings
from tandem.engine.events import Event, OrchestratorGone
from tandem.engine.vital_thread import VitalThread
from tandem.stream_address import connect
from tandem.types import Load

HEARTBEAT_S = 0.5
_log = logging.getLogger(__name__)
_decode_submit = wire.decoder(wire.Submit).decode


def alive_every_s(settings: EngineSettings) -> float:
    """How often an engine gives its shim a sign of life."""
    return settings.engine_timeout_s / 5


@dataclass
class _Orchestrator:
    socket: zmq.Socket[bytes]
    last_heard_s: float
    last_sent_s: float = 0.0


class EngineIO:
    """An ``Outbox``. The public methods belong to the engine loop's thread; the sockets to the
    thread ``engine-io``. ``load`` is the newest load, replaced by the loop, sent with heartbeats;
    ``step_began_s`` is when the step under way began.
    """

    def __init__(self, config: EngineConfig, incarnation: str, post: Callable[[Event], None]):
        self.load = Load(role=config.settings.role)
        self.step_began_s: float | None = None
        self._config = config
        self._incarnation = incarnation
        self._post = post
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._outgoing = self._context.socket(zmq.PUSH)
        self._outgoing.bind("inproc://outgoing")
        self._orchestrators: dict[str, _Orchestrator] = {}
        self._alive_every_s = alive_every_s(config.settings)
        self._alive_sent_s = 0.0
        self._thread = VitalThread(self._serve, name="engine-io")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._outgoing.send_multipart([b"stop", b"", b""])
        self._thread.join(timeout=2)
        self._outgoing.close(linger=0)
        self._context.term()

    def to_shim(self, message: wire.Reply | wire.Left | wire.Stats | wire.Ready) -> None:
        self._outgoing.send_multipart([b"shim", b"", wire.encode(message)])

    def to_orchestrator(self, name: str, message: wire.StepMessage) -> None:
        self._outgoing.send_multipart([b"orchestrator", name.encode(), wire.encode(message)])

    def meet(self, name: str) -> None:
        self._outgoing.send_multipart([b"meet", name.encode(), b""])

    # ---- the thread --------------------------------------------------------------------

    def _serve(self) -> None:
        self._incoming = self._context.socket(zmq.PULL)
        self._incoming.connect("inproc://outgoing")
        self._shim = self._context.socket(zmq.DEALER)
        self._shim.connect(self._config.channel)
        self._poller = zmq.Poller()
        self._poller.register(self._incoming, zmq.POLLIN)
        self._poller.register(self._shim, zmq.POLLIN)
        self._idle_ms = min(1000, int(self._alive_every_s * 1000))
        running = True
        while running:
            for socket, _ in self._poller.poll(100 if self._orchestrators else self._idle_ms):
                if socket is self._incoming:
                    running = self._forward(*self._incoming.recv_multipart())
                else:
                    self._receive(socket)
            self._keep_alive(time.monotonic())
        for orchestrator in self._orchestrators.values():
            orchestrator.socket.close(linger=200)
        self._shim.close(linger=200)
        self._incoming.close(linger=0)

    def _forward(self, kind: bytes, name: bytes, payload: bytes) -> bool:
        if kind == b"stop":
            return False
        if kind == b"shim":
            self._shim.send(payload)
        elif kind == b"meet":
            self._connect(name.decode())
        else:
            orchestrator = self._connect(name.decode())
            orchestrator.socket.send(payload)
            orchestrator.last_sent_s = time.monotonic()
        return True

    def _connect(self, name: str) -> _Orchestrator:
        if name not in self._orchestrators:
            socket = self._context.socket(zmq.DEALER)
            socket.identity = f"{self._config.worker}:{self._incarnation}".encode()
            socket.sndhwm = 0  # never blocks; a silent orchestrator is dropped with its queue
            connect(socket, self._config.deployment, name)
            self._poller.register(socket, zmq.POLLIN)
            self._orchestrators[name] = _Orchestrator(socket, last_heard_s=time.monotonic())
        return self._orchestrators[name]

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        payload = socket.recv_multipart()[-1]
        try:
            if socket is self._shim:
                self._post(_decode_submit(payload))
            else:
                self._hear(socket, wire.decode_from_orchestrator(payload))
        except msgspec.DecodeError:
            _log.exception("a message to engine %s cannot be read", self._config.worker)

    def _hear(self, socket: zmq.Socket[bytes], message: wire.FromOrchestrator) -> None:
        orchestrator = next(o for o in self._orchestrators.values() if o.socket is socket)
        orchestrator.last_heard_s = time.monotonic()
        if not isinstance(message, wire.Ping):
            self._post(message)

    def _keep_alive(self, now_s: float) -> None:
        if now_s - self._alive_sent_s >= self._alive_every_s:
            began_s = self.step_began_s
            self._shim.send(wire.encode(wire.Alive(step_s=now_s - began_s if began_s else 0.0)))
            self._alive_sent_s = now_s
        for name, orchestrator in list(self._orchestrators.items()):
            if now_s - orchestrator.last_heard_s > self._config.settings.orchestrator_timeout_s:
                _log.warning("orchestrator %s is silent; dropping its sequences", name)
                self._poller.unregister(orchestrator.socket)
                orchestrator.socket.close(linger=0)
                del self._orchestrators[name]
                self._post(OrchestratorGone(name))
            elif now_s - orchestrator.last_sent_s >= HEARTBEAT_S:
                orchestrator.socket.send(wire.encode(self._heartbeat()))
                orchestrator.last_sent_s = now_s

    def _heartbeat(self) -> wire.StepMessage:
        return wire.StepMessage(
            worker=self._config.worker, incarnation=self._incarnation, load=self.load
        )
