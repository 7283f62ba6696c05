"""What a report is made of: the runs in a folder, and the comparison they belong to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec

from tandem_cli.errors import CliError
from tandem_perf.comparison import Row, comparison_rows, length_classes
from tandem_perf.comparison_result import COMPARISON, ComparisonResult, Fault
from tandem_perf.records import RequestRecord, read_records
from tandem_perf.run import RECORDS, SUMMARY, TIMELINE
from tandem_perf.summary import Summary, read_summary
from tandem_perf.timeline import TimelineRow, read_timeline

CALIBRATION = "calibration"


@dataclass(frozen=True)
class Run:
    """One folder with a summary; records and timeline are read when they are needed."""

    folder: Path
    summary: Summary

    @property
    def is_sweep(self) -> bool:
        """Whether it is one rate of several."""
        return self.folder.name.startswith("rate-")

    @cached_property
    def records(self) -> list[RequestRecord]:
        return list(read_records(self.folder / RECORDS))

    @cached_property
    def timeline(self) -> list[TimelineRow]:
        path = self.folder / TIMELINE
        return list(read_timeline(path)) if path.is_file() else []


@dataclass(frozen=True)
class ReportData:
    """``runs``: by deployment, those that are compared, in the order of their rounds.
    ``sweep``: by deployment, those at other rates. No deployment is in ``runs`` without a run.
    """

    folder: Path
    comparison: ComparisonResult | None
    runs: dict[str, list[Run]]
    sweep: dict[str, list[Run]]

    @property
    def first(self) -> Summary:
        """Of the baseline; what all runs have in common is read from it."""
        return next(iter(self.runs.values()))[0].summary

    @property
    def deployments(self) -> list[str]:
        return list(self.runs)

    @property
    def rows(self) -> tuple[Row, ...]:
        return comparison_rows(
            {
                name: {_number(run, place): run.summary for place, run in enumerate(runs)}
                for name, runs in self.runs.items()
            }
        )

    @property
    def length_classes(self) -> list[str]:
        """Shortest prompts first."""
        return length_classes(run.summary for runs in self.runs.values() for run in runs)

    @property
    def num_rounds(self) -> int:
        return max(len(runs) for runs in self.runs.values())

    def records(self, deployment: str) -> Iterator[RequestRecord]:
        """Of all rounds."""
        for run in self.runs[deployment]:
            yield from run.records


def read_report_data(folder: Path) -> ReportData:
    """Of a comparison, a single run, or a rate search; raises CliError if there is none."""
    try:
        comparison = _comparison(folder)
        found = [
            Run(path.parent, read_summary(path))
            for path in sorted(folder.rglob(SUMMARY))
            if path.parent.name != CALIBRATION
        ]
    except msgspec.MsgspecError as error:
        raise CliError(f"{folder}: not the results of this version: {error}") from error
    found.sort(key=lambda run: run.summary.started_at)
    faulty = {(fault.deployment, f"round-{fault.round}") for fault in _faults(comparison)}
    main = [
        run
        for run in found
        if not run.is_sweep and (run.summary.deployment, run.folder.name) not in faulty
    ]
    sweep = [run for run in found if run.is_sweep]
    if not main and sweep:
        main = [max(sweep, key=lambda run: run.summary.statistics.goodput)]
    if not main:
        raise CliError(f"{folder}: no results of a run (no {SUMMARY}) in it")
    order = comparison.deployments if comparison else ()
    return ReportData(folder, comparison, _by_deployment(main, order), _by_deployment(sweep, order))


def _comparison(folder: Path) -> ComparisonResult | None:
    path = folder / COMPARISON
    if not path.is_file():
        return None
    return msgspec.json.decode(path.read_bytes(), type=ComparisonResult)


def _faults(comparison: ComparisonResult | None) -> Iterable[Fault]:
    return comparison.faults if comparison else ()


def _by_deployment(runs: list[Run], order: Iterable[str]) -> dict[str, list[Run]]:
    names = dict.fromkeys([*order, *(run.summary.deployment for run in runs)])
    grouped = {
        name: [run for run in runs if run.summary.deployment == name] for name in names
    }
    return {name: found for name, found in grouped.items() if found}


def _number(run: Run, place: int) -> int:
    """Of the round, as the folder says; else by time."""
    kind, _, number = run.folder.name.partition("-")
    return int(number) if kind == "round" and number.isdigit() else place + 1
