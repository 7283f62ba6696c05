"""An engine's stats as metrics: gauges as they are, totals as what they grew by."""

from __future__ import annotations

from tandem import wire
from tandem.kv.block_manager import BlockCounts
from tandem.metrics import MetricsBuffer

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


class StatsPublisher:
    """Owned by the supervisor's thread."""

    def __init__(self, metrics: MetricsBuffer) -> None:
        self._metrics = metrics
        self._totals: dict[str, float] = {}

    def expect_new_engine(self) -> None:
        """The totals of a new incarnation begin at zero, and it holds nothing yet."""
        self._totals = {}
        for state in BlockCounts._fields:
            self._metrics.set("tandem_kv_blocks", 0, state)
        for name in ("kv_leases", "running", "waiting", "waiting_tokens"):
            self._metrics.set(f"tandem_{name}", 0)

    def publish(self, stats: wire.Stats) -> None:
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
