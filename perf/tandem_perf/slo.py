"""Service level objectives, as ``--slo ttft=0.5,tpot=100ms`` gives them."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tandem_perf.percentiles import percentile
from tandem_perf.records import RequestRecord

Measure = Callable[[RequestRecord], float | None]


class SloError(ValueError):
    """A text that is no list of objectives; the message says why."""


def _gap_percentile(percent: float) -> Measure:
    def measure(record: RequestRecord) -> float | None:
        gaps = record.gaps_s
        return percentile(sorted(gaps), percent) if gaps else None

    return measure


# All per request, in seconds.
MEASURES: dict[str, Measure] = {
    "ttft": lambda record: record.ttft_s,
    "tpot": lambda record: record.tpot_s,
    "e2e": lambda record: record.e2e_s,
    "itl_p50": _gap_percentile(50),
    "itl_p90": _gap_percentile(90),
    "itl_p95": _gap_percentile(95),
    "itl_p99": _gap_percentile(99),
    "itl_max": _gap_percentile(100),
}


class Slo(msgspec.Struct, frozen=True):
    """Limits in seconds by the name of a measure. Empty: every completed request meets it."""

    limits_s: dict[str, float] = {}

    def is_met(self, record: RequestRecord) -> bool:
        """Completed, and within every limit. What a request does not have (TPOT of one token)
        it does not miss; one without a first token did not complete.
        """
        if not record.is_ok or record.ttft_s is None:
            return False
        for name, limit_s in self.limits_s.items():
            value = MEASURES[name](record)
            if value is not None and value > limit_s:
                return False
        return True

    def __str__(self) -> str:
        return ", ".join(f"{name} ≤ {limit:g} s" for name, limit in self.limits_s.items())


def parse_slo(text: str) -> Slo:
    """``name=seconds`` or ``name=…ms``, separated by commas; raises SloError."""
    limits: dict[str, float] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, value = part.partition("=")
        if name not in MEASURES:
            raise SloError(f"{part!r}: {name!r} is none of {', '.join(MEASURES)}")
        scale = 1e-3 if value.endswith("ms") else 1.0
        try:
            limits[name] = float(value.removesuffix("ms").removesuffix("s")) * scale
        except ValueError:
            raise SloError(f"{part!r}: write it like {name}=0.5 or {name}=500ms") from None
        if not limits[name] > 0:
            raise SloError(f"{part!r}: must be more than 0")
    return Slo(limits)
