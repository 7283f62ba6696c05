"""Publishes a ``MetricsBuffer`` on Triton's /metrics, from one thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from typing import Any

import triton_python_backend_utils as pb_utils

from tandem.metrics import Family, Key, MetricsBuffer

PERIOD_S = 0.1
_log = logging.getLogger(__name__)


class TritonMetrics:
    """Owns Triton's metric objects; creates every known label value at once, so that a scrape of
    a fresh server shows every family.
    """

    def __init__(
        self, buffer: MetricsBuffer, families: Iterable[Family], constant_labels: dict[str, str]
    ) -> None:
        self._buffer = buffer
        self._constant_labels = constant_labels
        self._families: dict[str, tuple[Family, Any]] = {}
        self._metrics: dict[Key, Any] = {}
        for family in families:
            kind = getattr(pb_utils.MetricFamily, family.kind.upper())
            # Triton deletes a family with its Python object, so the object is kept.
            owner = pb_utils.MetricFamily(name=family.name, description=family.help, kind=kind)
            self._families[family.name] = (family, owner)
            for value in family.values or ("",):
                self._metric(Key(family.name, value))
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(timeout=5)
        self._metrics.clear()  # before their families
        self._families.clear()

    def _run(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            try:
                self._publish()
            except Exception:
                _log.exception("metrics could not be published")

    def _publish(self) -> None:
        counters, gauges, observations = self._buffer.drain()
        for key, amount in counters.items():
            self._metric(key).increment(amount)
        for key, value in gauges.items():
            self._metric(key).set(value)
        for key, value in observations:
            self._metric(key).observe(value)

    def _metric(self, key: Key) -> Any:
        if key not in self._metrics:
            family, owner = self._families[key.name]
            labels = dict(self._constant_labels)
            if family.label:
                labels[family.label] = key.label_value
            buckets = {"buckets": list(family.buckets)} if family.kind == "histogram" else {}
            self._metrics[key] = owner.Metric(labels=labels, **buckets)
        return self._metrics[key]
