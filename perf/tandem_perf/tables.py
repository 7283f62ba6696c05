"""A run as tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from tandem_perf.percentiles import Distribution
from tandem_perf.rate_search import RateSearch
from tandem_perf.server_side import ServerSide
from tandem_perf.slo import Slo
from tandem_perf.statistics import Group
from tandem_perf.summary import Summary

_LATE_MS = 50.0


def print_summary(summary: Summary, console: Console) -> None:
    console.print(_latency_table(summary))
    console.print(_throughput_table(summary))
    if summary.server_side is not None:
        console.print(_server_table(summary.server_side))
    if summary.statistics.errors:
        console.print(_error_table(summary.statistics.errors))
    for warning in _warnings(summary):
        console.print(f"[yellow]warning:[/yellow] {warning}", highlight=False)


def print_search(search: RateSearch, console: Console) -> None:
    table = Table(title="rate search")
    for title in ("requests/s", "attainment", ""):
        table.add_column(title, justify="right")
    for trial in search.trials:
        verdict = "[green]passes[/green]" if search.passes(trial) else "[red]fails[/red]"
        table.add_row(f"{trial.rate:.2f}", f"{trial.attainment:.1%}", verdict)
    console.print(table)
    best = search.best
    found = "no rate passed" if best is None else f"highest rate that passes: {best:.2f} requests/s"
    console.print(found, highlight=False)


def _latency_table(summary: Summary) -> Table:
    title = (
        f"{summary.deployment} · {summary.workload} · {summary.arrivals} · seed {summary.seed} · "
        f"requests {summary.request_digest}"
    )
    table = Table(title=title, caption="milliseconds; from the scheduled time")
    table.add_column("class", no_wrap=True)
    table.add_column("", no_wrap=True)
    for title in ("count", "mean", "p50", "p90", "p95", "p99", "max"):
        table.add_column(title, justify="right", no_wrap=True)
    statistics = summary.statistics
    groups = {"all": statistics.overall}
    if len(statistics.by_class) > 1:
        groups |= statistics.by_class
    for name, group in groups.items():
        latencies = group.latencies
        rows = {"TTFT": latencies.ttft, "ITL": latencies.itl, "TPOT": latencies.tpot,
                "E2E": latencies.e2e}  # fmt: skip
        for label, values in rows.items():
            table.add_row(name if label == "TTFT" else "", label, *_cells(values))
        table.add_section()
    return table


def _throughput_table(summary: Summary) -> Table:
    statistics = summary.statistics
    table = Table()
    table.add_column("class")
    for title in ("requests", "completed", "failed", "cancelled", "in SLO"):
        table.add_column(title, justify="right")
    groups = {"all": statistics.overall}
    if len(statistics.by_class) > 1:
        groups |= statistics.by_class
    for name, group in groups.items():
        counts = (group.requests, group.completed, group.failed, group.cancelled)
        table.add_row(name, *map(str, counts), _attainment(group))
    table.caption = (
        f"{statistics.requests_per_s:.2f} requests/s · tokens/s: "
        f"{statistics.input_tokens_per_s:.0f} in, {statistics.output_tokens_per_s:.1f} out · "
        f"{statistics.duration_s:.1f} s"
    )
    if summary.slo:
        table.caption += f"\ngoodput {statistics.goodput:.2f}/s in SLO ({Slo(summary.slo)})"
    return table


def _server_table(server: ServerSide) -> Table:
    table = Table(title="server side", show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    for kind, spent_s in server.cpu_s.items():
        per_token = server.cpu_us_per_token.get(kind)
        detail = "" if per_token is None else f" · {per_token:,.0f} µs a token"
        peak = server.peak_rss_bytes.get(kind, 0) / 1e6
        table.add_row(f"CPU {kind}", f"{spent_s:.2f} s{detail} · RSS {peak:,.0f} MB")
    if server.has_metrics:
        for name, value in _metric_rows(server):
            table.add_row(name, value)
    else:
        table.add_row("metrics", "none could be read")
    return table


def _metric_rows(server: ServerSide) -> Iterator[tuple[str, str]]:
    for worker, share in server.busy.items():
        yield f"busy {worker}", f"{share:.0%}"
    shares = " · ".join(f"{path} {share:.0%}" for path, share in server.path_shares.items())
    yield "paths", shares or "none"
    yield "KV pulled", f"{server.kv_bytes / 1e6:,.1f} MB in {server.transfer_s * 1e3:,.1f} ms"
    yield "prompt tokens cached", f"{server.cached_tokens:,.0f} of {server.prompt_tokens:,.0f}"
    yield "re-prefills", f"{server.reprefills:.0f}"
    yield "preemptions", f"{server.preemptions:.0f}"
    if server.lost_samples:
        yield "scrapes that failed", str(server.lost_samples)


def _error_table(errors: dict[str, int]) -> Table:
    table = Table(title="failed requests", style="red")
    table.add_column("count", justify="right")
    table.add_column("message")
    for message, count in errors.items():
        table.add_row(str(count), message)
    return table


def _warnings(summary: Summary) -> Iterator[str]:
    statistics = summary.statistics
    if summary.interrupted:
        yield "the run was stopped before its end"
    if summary.warm_up_failed:
        yield f"{summary.warm_up_failed} of {summary.warm_up} warm-up requests failed"
    lag = statistics.send_lag.p99
    if lag is not None and lag * 1e3 > _LATE_MS:
        yield (
            f"1 % of requests were sent {lag * 1e3:.0f} ms late or more: this machine is too "
            "slow for the load; latencies include that"
        )
    if statistics.wrong_length:
        yield f"{statistics.wrong_length} answers have another length than asked for"
    if statistics.with_chunks:
        yield (
            f"{statistics.with_chunks} answers came in chunks of several tokens; their ITL is "
            "between chunks"
        )


def _attainment(group: Group) -> str:
    return "–" if group.attainment is None else f"{group.attainment:.1%}"


def _cells(values: Distribution) -> list[str]:
    quantities = (values.mean, values.p50, values.p90, values.p95, values.p99, values.max)
    return [str(values.count), *("–" if q is None else _milliseconds(q) for q in quantities)]


def _milliseconds(quantity_s: float) -> str:
    value = quantity_s * 1e3
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"
