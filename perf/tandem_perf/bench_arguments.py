"""From what a user typed to typed values; raises CliError that names the option."""

from __future__ import annotations

from tandem_cli.errors import CliError
from tandem_perf.arrivals import (
    Arrivals,
    ClosedLoop,
    ConstantArrivals,
    PoissonArrivals,
    TraceArrivals,
)
from tandem_perf.slo import Slo, SloError, parse_slo
from tandem_perf.workloads.base import TokenRange

DEFAULT_RATE = 2.0


def arrivals_from(rate: float | None, kind: str, concurrency: int | None) -> Arrivals:
    if concurrency is not None:
        if rate is not None:
            raise CliError("--rate and --concurrency exclude each other")
        return ClosedLoop(concurrency)
    if kind == "trace":
        if rate is not None:
            raise CliError("--rate and --arrivals trace exclude each other; use --speed")
        return TraceArrivals()
    per_s = DEFAULT_RATE if rate is None else rate
    if kind == "poisson":
        return PoissonArrivals(per_s)
    if kind == "constant":
        return ConstantArrivals(per_s)
    raise CliError(f"--arrivals {kind}: poisson, constant or trace")


def slo_from(text: str) -> Slo:
    try:
        return parse_slo(text)
    except SloError as error:
        raise CliError(f"--slo {error}") from error


def token_range_from(text: str) -> TokenRange:
    try:
        first, last = map(int, text.split(":"))
    except ValueError:
        first = last = 0
    if not 0 <= first < last <= 2**31:
        raise CliError(f"--token-ids {text}: write it like 1000:40000")
    return TokenRange(first, last)
