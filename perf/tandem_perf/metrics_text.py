"""Prometheus' text format: the samples whose name begins with a prefix."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")


@dataclass(frozen=True)
class Sample:
    name: str
    labels: dict[str, str]
    value: float


def parse_samples(text: str, prefix: str) -> list[Sample]:
    """Lines that are not samples are skipped; other prefixes are not even looked at."""
    samples = []
    for line in text.splitlines():
        if line.startswith(prefix) and (match := _SAMPLE.match(line)):
            pairs = _LABEL.findall(match["labels"] or "")
            labels = {name: _unescaped(value) for name, value in pairs}
            samples.append(Sample(match["name"], labels, float(match["value"])))
    return samples


def total(samples: list[Sample], name: str, **labels: str) -> float:
    """Sum of a family over all samples that have these labels."""
    return sum(
        sample.value
        for sample in samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def totals_by(samples: list[Sample], name: str, label: str) -> dict[str, float]:
    """Sum of a family for each value of one label."""
    result: dict[str, float] = {}
    for sample in samples:
        if sample.name == name and label in sample.labels:
            key = sample.labels[label]
            result[key] = result.get(key, 0.0) + sample.value
    return result


def _unescaped(value: str) -> str:
    return _ESCAPE.sub(lambda match: "\n" if match[1] == "n" else match[1], value)
