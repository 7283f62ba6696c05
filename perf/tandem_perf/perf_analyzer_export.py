"""TTFT and ITL from perf_analyzer's profile export: ``python -m tandem_perf.perf_analyzer_export``.

::

    experiments[].requests[]  timestamp            sent, ns
                              response_timestamps  [ns]
                              response_outputs     [{output: value}], beside them (may be missing)

The latency that perf_analyzer prints for a decoupled model ends with its first or its last
response, by version. The last response may be empty: a finish reason, or Triton's final flag. It
is no token, so it is dropped.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from tandem_perf.percentiles import Distribution, distribution

_NS = 1e-9


class ExportedRequest(msgspec.Struct, frozen=True, kw_only=True):
    timestamp: int
    response_timestamps: tuple[int, ...] = ()
    response_outputs: tuple[dict[str, Any], ...] = ()

    @property
    def token_times(self) -> tuple[int, ...]:
        """Arrivals in ns, without an empty last response."""
        times = self.response_timestamps
        return times[:-1] if self._ends_empty else times

    @property
    def _ends_empty(self) -> bool:
        """No text and no token: every other response had one of the answer's tokens. An output
        that a response does not have is exported as "", 0 or arbitrary bytes, so only the text
        and the count of tokens can be believed.
        """
        outputs = self.response_outputs
        if not outputs or outputs[-1].get("text_output"):
            return False
        counts = [output.get("num_output_tokens") or 0 for output in outputs[-2:]]
        return max(counts) < len(outputs)


class Experiment(msgspec.Struct, frozen=True, kw_only=True):
    experiment: dict[str, Any]  # mode and value, e.g. concurrency 4
    requests: tuple[ExportedRequest, ...]


class ExportSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds. ``without_tokens``: requests that got no response but, at most, an empty one."""

    load: str
    requests: int
    without_tokens: int
    requests_per_s: float
    tokens_per_s: float
    ttft: Distribution
    itl: Distribution
    e2e: Distribution


class _Export(msgspec.Struct, frozen=True, kw_only=True):
    experiments: tuple[Experiment, ...]


def read_export(path: Path) -> list[ExportSummary]:
    """One summary a load level. Raises ``msgspec.DecodeError`` if it is no profile export."""
    export = msgspec.json.decode(path.read_bytes(), type=_Export)
    return [summarize(experiment) for experiment in export.experiments]


def summarize(experiment: Experiment) -> ExportSummary:
    answered = [(r.timestamp, t) for r in experiment.requests if (t := r.token_times)]
    started = min((sent for sent, _ in answered), default=0)
    duration_s = (max((times[-1] for _, times in answered), default=0) - started) * _NS
    num_tokens = sum(len(times) for _, times in answered)
    return ExportSummary(
        load=" ".join(str(experiment.experiment.get(key, "")) for key in ("mode", "value")),
        requests=len(experiment.requests),
        without_tokens=len(experiment.requests) - len(answered),
        requests_per_s=len(answered) / duration_s if duration_s else 0.0,
        tokens_per_s=num_tokens / duration_s if duration_s else 0.0,
        ttft=distribution((times[0] - sent) * _NS for sent, times in answered),
        itl=distribution(
            (later - earlier) * _NS
            for _, times in answered
            for earlier, later in zip(times, times[1:], strict=False)
        ),
        e2e=distribution((times[-1] - sent) * _NS for sent, times in answered),
    )


def summary_table(summary: ExportSummary) -> Table:
    caption = f"{summary.requests_per_s:.2f} requests/s · {summary.tokens_per_s:.1f} tokens/s"
    table = Table(title=f"{summary.load} · {summary.requests} requests", caption=caption)
    for title in ("ms", "count", "mean", "p50", "p90", "p99", "max"):
        table.add_column(title, justify="left" if title == "ms" else "right")
    rows = {"TTFT": summary.ttft, "ITL": summary.itl, "end to end": summary.e2e}
    for name, values in rows.items():
        figures = (values.mean, values.p50, values.p90, values.p99, values.max)
        cells = ("–" if value is None else f"{value * 1e3:,.1f}" for value in figures)
        table.add_row(name, str(values.count), *cells)
    return table


def main(
    export: Annotated[Path, typer.Argument(help="Of --profile-export-file.")],
    out: Annotated[Path | None, typer.Option(help="The same as JSON.")] = None,
) -> None:
    try:
        summaries = read_export(export)
    except (OSError, msgspec.DecodeError) as error:
        sys.exit(f"{export}: {error}")
    for summary in summaries:
        Console().print(summary_table(summary))
        if summary.without_tokens:
            print(f"warning: {summary.without_tokens} of {summary.requests} requests got no token")
    if out is not None:
        out.write_bytes(msgspec.json.encode(summaries))
    if any(summary.without_tokens for summary in summaries) or not summaries:
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
