"""The thread that owns an engine: takes events from the inbox, steps, publishes stats."""

from __future__ import annotations

import queue
import time

from tandem import wire
from tandem.engine.engine import Engine
from tandem.engine.engine_io import EngineIO
from tandem.engine.events import Event, LeaseEnded, OrchestratorGone, Shutdown
from tandem.engine.imports import PullDone, PullSettled

STATS_PERIOD_S = 0.2


class EngineLoop:
    """``inbox`` may be written by any thread; everything else belongs to the one that ``run``s."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._published: wire.Stats | None = None
        self._published_s = 0.0

    def run(self, engine: Engine, io: EngineIO) -> None:
        """Until a ``Shutdown``. Waits for events only when there is nothing to compute."""
        io.load = engine.load()  # an orchestrator may hear of it before the first step ends
        did_compute = False
        while True:
            wait_s = 0.0 if did_compute else self._publish(engine, io)
            if not self._dispatch(engine, wait_s):
                return
            io.step_began_s = time.monotonic()
            did_compute = engine.step()
            io.step_began_s = None
            io.load = engine.load()
            if did_compute and time.monotonic() - self._published_s > STATS_PERIOD_S:
                self._publish(engine, io)

    def _publish(self, engine: Engine, io: EngineIO) -> float:
        """Sends the stats if they changed; returns how long the loop may sleep then."""
        stats = engine.stats()
        if stats != self._published:
            io.to_shim(stats)
            self._published, self._published_s = stats, time.monotonic()
        return 60.0

    def _dispatch(self, engine: Engine, wait_s: float) -> bool:
        """Hands every waiting event to the engine; False after a ``Shutdown``."""
        try:
            event = self.inbox.get(timeout=wait_s) if wait_s else self.inbox.get_nowait()
            while True:
                match event:
                    case wire.Submit():
                        engine.submit(event)
                    case wire.Cancel(sequence_ids=ids):
                        engine.cancel(ids)
                    case wire.Renew(sequence_ids=ids):
                        engine.renew(ids)
                    case PullDone():
                        engine.pull_done(event)
                    case PullSettled(sequence):
                        engine.pull_settled(sequence)
                    case LeaseEnded(lease, was_released):
                        engine.lease_ended(lease, was_released)
                    case OrchestratorGone(name):
                        engine.orchestrator_gone(name)
                    case Shutdown():
                        return False
                event = self.inbox.get_nowait()
        except queue.Empty:
            return True
