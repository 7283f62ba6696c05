"""Every metric family, and the buffer between the code that counts and Triton's /metrics.

Counting must be cheap and safe from any thread; Triton's own metric calls are neither (calling
them from two threads at once can end the server). So everything is buffered here, and one thread
per process drains the buffer (``triton_backend.triton_metrics``).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from tandem.types import TRANSPORTS, PriorityClass, Role

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(frozen=True)
class Family:
    """``values`` are the label values that exist from the start, so a fresh scrape shows them."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    label: str = ""
    values: tuple[str, ...] = ()
    buckets: tuple[float, ...] = _SECONDS


ORCHESTRATOR_FAMILIES = (
    Family("tandem_ttft_seconds", "histogram", "Request received to first token sent"),
    Family("tandem_itl_seconds", "histogram", "Gap between two tokens of one request"),
    Family("tandem_queue_seconds", "histogram", "Wait for a pool", "role", tuple(Role)),
    Family("tandem_prefill_seconds", "histogram", "Prefill compute", "path", ("remote", "local")),
    Family("tandem_transfer_seconds", "histogram", "KV pull of a request", "transport", TRANSPORTS),
    Family("tandem_decode_seconds", "histogram", "First token to last token"),
    Family("tandem_prompt_tokens_total", "counter", "Prompt tokens of accepted requests"),
    Family("tandem_cached_tokens_total", "counter", "Prompt tokens found in a prefix cache"),
    Family("tandem_output_tokens_total", "counter", "Tokens generated"),
    Family(
        "tandem_requests_total",
        "counter",
        "Requests by outcome",
        "outcome",
        ("stop", "length", "timeout", "cancelled", "INVALID_ARG", "UNAVAILABLE", "INTERNAL"),
    ),
    Family("tandem_path_total", "counter", "Placements by path", "path", ("remote", "local")),
    Family(
        "tandem_route_error_seconds",
        "histogram",
        "Difference between the expected and the actual time until a request decodes",
        "path",
        ("remote", "local"),
    ),
    Family(
        "tandem_route_regret_seconds_total",
        "counter",
        "Time by which the other path was expected to be faster than the chosen one was",
        "path",
        ("remote", "local"),
    ),
    Family("tandem_reprefills_total", "counter", "Requests placed again after a failure"),
    Family("tandem_requests_live", "gauge", "Requests accepted and not finished"),
    Family("tandem_admission_seconds", "histogram", "Request received to let into a pool"),
    Family("tandem_queued_requests", "gauge", "Requests that wait", "class", tuple(PriorityClass)),
    Family(
        "tandem_queued_tokens", "gauge", "Prompt tokens that wait", "class", tuple(PriorityClass)
    ),
)

ENGINE_FAMILIES = (
    Family("tandem_kv_blocks", "gauge", "KV blocks", "state", ("free", "cached", "leased", "used")),
    Family("tandem_kv_leases", "gauge", "Leases held by prefills that wait for their puller"),
    Family("tandem_leases_ended_total", "counter", "Leases", "outcome", ("released", "expired")),
    Family("tandem_transfers_total", "counter", "KV pulls", "outcome", ("ok", "failed")),
    Family("tandem_transfer_bytes_total", "counter", "KV bytes pulled"),
    Family("tandem_running", "gauge", "Sequences in the batch"),
    Family("tandem_waiting", "gauge", "Sequences waiting in the engine"),
    Family("tandem_waiting_tokens", "gauge", "Prompt tokens not computed yet"),
    Family("tandem_steps_total", "counter", "Engine steps"),
    Family("tandem_step_seconds_total", "counter", "Time in engine steps"),
    Family("tandem_computed_tokens_total", "counter", "Tokens through the model, prompt included"),
    Family("tandem_preemptions_total", "counter", "Sequences pushed out of the batch"),
    Family("tandem_engine_up", "gauge", "1 while the engine takes sequences"),
    Family("tandem_engine_restarts_total", "counter", "Engine processes started after the first"),
)


class Key(NamedTuple):
    name: str
    label_value: str = ""


@dataclass
class MetricsBuffer:
    """What was counted since the last ``drain``. Thread-safe."""

    _counters: dict[Key, float] = field(default_factory=dict)
    _gauges: dict[Key, float] = field(default_factory=dict)
    _observations: list[tuple[Key, float]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, name: str, amount: float = 1, label_value: str = "") -> None:
        with self._lock:
            key = Key(name, label_value)
            self._counters[key] = self._counters.get(key, 0) + amount

    def set(self, name: str, value: float, label_value: str = "") -> None:
        with self._lock:
            self._gauges[Key(name, label_value)] = value

    def observe(self, name: str, value: float, label_value: str = "") -> None:
        with self._lock:
            self._observations.append((Key(name, label_value), value))

    def drain(self) -> tuple[dict[Key, float], dict[Key, float], list[tuple[Key, float]]]:
        """Counter increments, newest gauge values and observations, in this order."""
        with self._lock:
            drained = (self._counters, self._gauges, self._observations)
            self._counters, self._gauges, self._observations = {}, {}, []
            return drained
