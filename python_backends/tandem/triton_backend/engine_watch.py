"""Whether an engine process still does its work, from the signs of life that it sends its shim."""

from __future__ import annotations

import asyncio

from tandem import wire
from tandem.config import EngineSettings

_CHECKS_PER_TIMEOUT = 5


class EngineWatch:
    """One life of an engine, from its ``Ready`` on.

    Silence is counted in checks and not in seconds: where the whole machine (or the shim) stood
    still, that was one check, and the engine gets time to speak.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._num_silent_checks = 0
        self._step_s = 0.0

    def heard(self, alive: wire.Alive) -> None:
        self._num_silent_checks = 0
        self._step_s = alive.step_s

    async def wait_for_failure(self) -> str:
        """Returns once the engine is frozen or stuck in a step, in words."""
        settings = self._settings
        while True:
            await asyncio.sleep(settings.engine_timeout_s / _CHECKS_PER_TIMEOUT)
            self._num_silent_checks += 1
            if self._num_silent_checks > _CHECKS_PER_TIMEOUT:
                return f"was silent for {settings.engine_timeout_s:g} s"
            if self._step_s > settings.step_timeout_s:
                return f"spent more than {settings.step_timeout_s:g} s in one step"
