"""What a path costs beyond the model's prediction, learnt from each request; and the regret."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from tandem.metrics import MetricsBuffer

_GAIN = 0.1  # how much of an error one request corrects
_MIN_BELIEVED_S = 0.1  # an error counts up to this, or to what was expected: one may be stuck
_FADE = 0.98  # what is left of the overhead of the other path, so that it is tried again


class Path(StrEnum):
    REMOTE = "remote"  # prefill pool, KV hand-over, decode pool
    LOCAL = "local"  # the decode worker prefills it, in chunks between its decode steps


class PathCosts:
    """Calls, queues and threads on the way take time that no worker can measure."""

    def __init__(self, metrics: MetricsBuffer) -> None:
        self._metrics = metrics
        self._overhead_s = {path: 0.0 for path in Path}

    def overhead_s(self, path: Path) -> float:
        return self._overhead_s[path]

    def observe(self, path: Path, expected_s: Mapping[Path, float], actual_s: float) -> None:
        """A request took ``actual_s`` on this path; ``expected_s`` held its overhead."""
        other = Path.LOCAL if path is Path.REMOTE else Path.REMOTE
        if expected_s[path] < float("inf"):
            error_s = actual_s - expected_s[path]
            self._metrics.observe("tandem_route_error_seconds", abs(error_s), path)
            believed_s = min(error_s, max(expected_s[path], _MIN_BELIEVED_S))
            self._overhead_s[path] = max(0.0, self._overhead_s[path] + _GAIN * believed_s)
        self._overhead_s[other] *= _FADE
        if actual_s > expected_s[other]:
            regret_s = actual_s - expected_s[other]
            self._metrics.count("tandem_route_regret_seconds_total", regret_s, path)
