"""Keeps a running server truthful: dead stubs are revived, and a server that cannot serve ends.

Triton never restarts a dead Python stub and keeps its model READY. What ran behind a stub of
``prefill`` or ``decode`` is placed again, so it is enough to unload such a model and to load it.
Requests in a dead ``llm`` hang for ever, whatever is done to the model: the server has to end.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

from tandem_cli.errors import CliError
from tandem_cli.health import probe, probed_paths
from tandem_cli.roles import ServerRole
from tandem_cli.server import TandemServer
from tandem_cli.stubs import stubs_of

PROBE_EVERY_S = 30.0
PROBE_TIMEOUT_S = 30.0
MAX_FAILED_PROBES = 3  # in a row, without a token for anybody meanwhile


class ServerBroken(CliError):
    """The server cannot serve any more and cannot be repaired while it runs."""


class Watchdog:
    """Owned by the main thread; probes wait for their answers in a thread of their own."""

    def __init__(self, server: TandemServer, log: Callable[[str], None]) -> None:
        self._server = server
        self._log = log
        self._expected = Counter(stubs_of(server.pid).values())
        self._missing: Counter[str] = Counter()  # at the last check
        self._probing: threading.Thread | None = None
        self._next_probe_s = time.monotonic() + PROBE_EVERY_S
        self._num_failed = 0
        self._num_tokens = 0.0

    def check(self) -> None:
        """Repairs what can be repaired; raises ``ServerBroken`` for the rest. Call it often."""
        missing = self._expected - Counter(stubs_of(self._server.pid).values())
        # The kernel may leave a process out of one listing while another one ends: look twice.
        lost, self._missing = missing & self._missing, missing
        if "llm" in lost:
            raise ServerBroken("the process of the model llm has died")
        for model in lost:
            self._revive(model)
        if self._num_failed >= MAX_FAILED_PROBES:
            raise ServerBroken(f"{self._num_failed} health probes have failed, one after the other")
        if self._server.options.role != ServerRole.ALL:
            return  # a request would tell of other servers, or would need one
        if self._probing is None or not self._probing.is_alive():
            if time.monotonic() >= self._next_probe_s:
                self._probing = threading.Thread(target=self._probe, name="probe", daemon=True)
                self._probing.start()

    def _revive(self, model: str) -> None:
        self._log(f"a process of the model {model} has died; loading the model again")
        try:
            self._server.reload(model)
        except CliError as error:
            raise ServerBroken(f"the model {model} cannot be loaded again: {error}") from error
        self._missing.clear()
        self._log(f"the model {model} serves again")

    def _probe(self) -> None:
        url = self._server.http_url
        try:
            for path in probed_paths(url, PROBE_TIMEOUT_S):
                probe(url, path, PROBE_TIMEOUT_S)
            self._num_failed = 0
        except CliError as error:
            self._log(f"health probe: {error}")
            self._num_failed = 0 if self._has_new_tokens() else self._num_failed + 1
        self._next_probe_s = time.monotonic() + PROBE_EVERY_S

    def _has_new_tokens(self) -> bool:
        """Under overload a probe may be refused while others are served."""
        before, self._num_tokens = self._num_tokens, self._server.num_output_tokens()
        return self._num_tokens > before
