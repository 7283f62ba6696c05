"""Figures of several deployments side by side: medians over rounds, ratios to the first one."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from tandem_perf.statistics import Group
from tandem_perf.summary import Summary

Rounds = Mapping[int, Summary]  # by number of the round


class Spread(msgspec.Struct, frozen=True):
    """Over rounds: the median, the lowest and the highest value."""

    median: float
    low: float
    high: float
    count: int


class Verdict(StrEnum):
    BETTER = "better"  # in every round
    WORSE = "worse"
    UNCLEAR = "unclear"  # rounds disagree, or there was one only


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One metric. ``values`` and ``ratios`` by deployment, None where nothing was measured.

    A ratio is value / value of the first deployment in the same round, so that what changes from
    round to round on a machine cancels out.
    """

    section: str
    metric: str
    unit: str
    is_higher_better: bool
    values: dict[str, Spread | None]
    ratios: dict[str, Spread | None]

    def verdict(self, deployment: str) -> Verdict:
        ratio = self.ratios.get(deployment)
        if ratio is None or ratio.count < 2 or ratio.low <= 1 <= ratio.high:
            return Verdict.UNCLEAR
        return Verdict.BETTER if (ratio.low > 1) == self.is_higher_better else Verdict.WORSE


@dataclass(frozen=True, kw_only=True)
class Metric:
    section: str
    name: str
    unit: str
    read: Callable[[Summary], float | None]
    is_higher_better: bool = False


def comparison_rows(runs: Mapping[str, Rounds]) -> tuple[Row, ...]:
    """The first deployment is the one that others are compared with."""
    summaries = [summary for rounds in runs.values() for summary in rounds.values()]
    return tuple(
        row
        for metric in _metrics(summaries)
        if any((row := _row(metric, runs)).values.values())
    )


def length_classes(summaries: Iterable[Summary]) -> list[str]:
    """Shortest prompts first."""
    tokens: dict[str, list[float]] = {}
    for summary in summaries:
        for name, group in summary.statistics.by_class.items():
            tokens.setdefault(name, []).append(group.prompt_tokens / max(1, group.completed))
    return sorted(tokens, key=lambda name: (max(tokens[name]), name))


def spread(values: Iterable[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Spread(statistics.median(known), min(known), max(known), len(known))


def _row(metric: Metric, runs: Mapping[str, Rounds]) -> Row:
    measured = {
        name: {number: metric.read(summary) for number, summary in rounds.items()}
        for name, rounds in runs.items()
    }
    first = next(iter(measured.values()))
    return Row(
        section=metric.section,
        metric=metric.name,
        unit=metric.unit,
        is_higher_better=metric.is_higher_better,
        values={name: spread(values.values()) for name, values in measured.items()},
        ratios={
            name: spread(_ratio(value, first.get(number)) for number, value in values.items())
            for name, values in measured.items()
        },
    )


def _ratio(value: float | None, baseline: float | None) -> float | None:
    return None if value is None or not baseline else value / baseline


def _metrics(summaries: Iterable[Summary]) -> list[Metric]:
    summaries = list(summaries)
    classes = length_classes(summaries)
    metrics = [
        _rate("requests", "1/s", lambda s: s.statistics.requests_per_s),
        _rate("output tokens", "1/s", lambda s: s.statistics.output_tokens_per_s),
    ]
    if any(summary.slo for summary in summaries):
        metrics.append(_rate("goodput (in SLO)", "1/s", lambda s: s.statistics.goodput))
        metrics.append(
            _rate("requests in SLO", "%", lambda s: _percent(s.statistics.overall.attainment))
        )
    metrics += _latencies("all requests", lambda s: s.statistics.overall)
    for name in classes if len(classes) > 1 else ():
        metrics += _class_latencies(f"{name} prompts", _class_reader(name))
    return [*metrics, *_COSTS]


def _rate(name: str, unit: str, read: Callable[[Summary], float | None]) -> Metric:
    return Metric(section="throughput", name=name, unit=unit, read=read, is_higher_better=True)


def _class_reader(name: str) -> Callable[[Summary], Group | None]:
    return lambda summary: summary.statistics.by_class.get(name)


def _latencies(section: str, group: Callable[[Summary], Group | None]) -> list[Metric]:
    wanted = [("ttft", 50), ("ttft", 95), ("ttft", 99), ("itl", 50), ("itl", 99),
              ("tpot", 50), ("tpot", 99), ("e2e", 50), ("e2e", 99)]  # fmt: skip
    return [_latency(section, group, quantity, percent) for quantity, percent in wanted]


def _class_latencies(section: str, group: Callable[[Summary], Group | None]) -> list[Metric]:
    wanted = [("ttft", 50), ("ttft", 95), ("itl", 50), ("itl", 99), ("e2e", 50)]
    return [_latency(section, group, quantity, percent) for quantity, percent in wanted]


def _latency(
    section: str, group: Callable[[Summary], Group | None], quantity: str, percent: int
) -> Metric:
    def read(summary: Summary) -> float | None:
        found = group(summary)
        if found is None:
            return None
        value: float | None = getattr(getattr(found.latencies, quantity), f"p{percent}")
        return None if value is None else value * 1e3

    label = "end to end" if quantity == "e2e" else quantity.upper()
    return Metric(section=section, name=f"{label} p{percent}", unit="ms", read=read)


def _percent(share: float | None) -> float | None:
    return None if share is None else share * 100


def _cpu_ms_per_token(summary: Summary) -> float | None:
    costs = summary.server_side.cpu_us_per_token if summary.server_side else {}
    return sum(costs.values()) / 1e3 if costs else None


def _peak_memory_mb(summary: Summary) -> float | None:
    peaks = summary.server_side.peak_rss_bytes if summary.server_side else {}
    return sum(peaks.values()) / 1e6 if peaks else None


_COSTS = (
    Metric(section="cost", name="CPU per output token", unit="ms", read=_cpu_ms_per_token),
    Metric(section="cost", name="peak memory, all processes", unit="MB", read=_peak_memory_mb),
    Metric(
        section="cost", name="failed requests", unit="",
        read=lambda s: float(s.statistics.overall.failed),
    ),
)  # fmt: skip
