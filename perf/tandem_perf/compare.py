"""``tandem bench compare``: several deployments, the same requests, side by side."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tandem.types import Policy
from tandem_cli.errors import CliError
from tandem_perf.arrivals import Arrivals, ClosedLoop
from tandem_perf.bench_arguments import arrivals_from, slo_from, token_range_from
from tandem_perf.comparison_result import COMPARISON, ComparisonResult
from tandem_perf.comparison_run import ComparisonPlan, ComparisonRun
from tandem_perf.comparison_table import print_comparison
from tandem_perf.deployments import BUILT_IN, COLOCATED, DISAGGREGATED, Deployment, built_in
from tandem_perf.external_server import read_deployments
from tandem_perf.process_group import core_set
from tandem_perf.provenance import this_provenance
from tandem_perf.run_config import RunConfig
from tandem_perf.slo import MEASURES
from tandem_perf.summary import write_json
from tandem_perf.targets.base import TargetError, TargetOptions
from tandem_perf.workloads.base import WorkloadError, WorkloadOptions
from tandem_perf.workloads.registry import NAMES as WORKLOADS


def compare(
    deployment: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Give it several times; the first is the baseline. {', '.join(BUILT_IN)}, or a "
            f"name of --deployments. Default: {COLOCATED} and {DISAGGREGATED}."
        ),
    ] = None,
    deployments: Annotated[
        Path | None,
        typer.Option(help="TOML file of deployments, see perf/examples."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="A B A B is 2 rounds.")] = 2,
    workload: Annotated[str, typer.Option(help=", ".join(WORKLOADS))] = "mixed-60-40",
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Open loop, Poisson, sessions/s.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Closed loop: so many users (default 8).")
    ] = None,
    load: Annotated[
        float | None,
        typer.Option(
            min=0.05, max=2.0,
            help="Open loop at this share of what the first deployment can do (a short run).",
        ),
    ] = None,
    num_requests: Annotated[
        int | None, typer.Option(min=1, help="Of one run; default 60, or what fits the budget.")
    ] = None,
    time_budget: Annotated[
        float | None,
        typer.Option(min=30, help="Seconds for all of it; a short run finds out what fits."),
    ] = None,
    sweep: Annotated[
        str, typer.Option(help="Rates, e.g. 0.5,1,2: further runs, for goodput against rate.")
    ] = "",
    sweep_s: Annotated[float, typer.Option(min=1, help="Seconds of each of them.")] = 30.0,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same requests.")] = 0,
    slo: Annotated[
        str, typer.Option(help=f"E.g. ttft=0.5,tpot=100ms. Known: {', '.join(MEASURES)}.")
    ] = "",
    warmup: Annotated[int, typer.Option(min=0, help="Requests before each run.")] = 4,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for a whole answer.")] = 120.0,
    cores: Annotated[
        str, typer.Option(help="Cores of the servers, e.g. 0-7; the load uses the others.")
    ] = "",
    policy: Annotated[Policy, typer.Option(help=f"Of {DISAGGREGATED}.")] = Policy.AUTO,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="[MODEL.]KEY=VALUE", help="Of the built-in deployments."),
    ] = None,
    token_ids: Annotated[
        str, typer.Option(metavar="FIRST:LAST", help="Ids that random prompts are made of.")
    ] = "1000:40000",
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="tokenizer.json: send text of the exact length, not token ids."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results (default bench-results/<time>).")
    ] = None,
    report: Annotated[bool, typer.Option(help="Write report.html and PNG files.")] = True,
) -> None:
    """Measure deployments in turn, A B A B, each started fresh, only one up at a time.

    Every run sends the same requests and is warmed up first. Prints medians over rounds with the
    lowest and highest, and ratios to the first deployment; keeps the raw records of every run.
    Exits with 1 if a run failed or a request did.
    """
    console = Console()
    if time_budget is not None and (sweep or num_requests is not None):
        raise CliError("--time-budget excludes --num-requests and --sweep")
    server_cores = _cores(cores)
    names = deployment or [COLOCATED, DISAGGREGATED]
    if len(set(names)) < len(names):
        raise CliError("--deployment: each name once")
    plan = ComparisonPlan(
        deployments=_chosen(names, deployments, policy, tuple(settings or ()), server_cores),
        rounds=rounds,
        load=RunConfig(
            target="", target_options=TargetOptions(url="", timeout_s=timeout),
            workload=workload,
            workload_options=WorkloadOptions(token_range=token_range_from(token_ids)),
            arrivals=_arrivals(rate, concurrency, load),
            out_dir=out or Path("bench-results") / datetime.now().strftime("%Y%m%d-%H%M%S"),
            tokenizer=tokenizer, num_requests=num_requests, seed=seed, warm_up=warmup,
            slo=slo_from(slo),
        ),
        cores=server_cores, budget_s=time_budget, load_share=load, sweep=_rates(sweep),
        sweep_s=sweep_s,
    )  # fmt: skip
    result = run_comparison(plan, console, with_report=report)
    raise typer.Exit(1 if has_failed(result) else 0)


def run_comparison(
    plan: ComparisonPlan, console: Console, *, with_report: bool
) -> ComparisonResult:
    """Prints the table and where the files are."""
    folder = plan.load.out_dir
    folder.mkdir(parents=True, exist_ok=True)
    try:
        result = ComparisonRun(plan, console).run(this_provenance(plan.cores))
    except (WorkloadError, TargetError) as error:
        raise CliError(str(error)) from error
    write_json(folder / COMPARISON, result)
    if result.rows:
        print_comparison(result, console)
        if with_report:
            from tandem_perf.report import write_report

            console.print(f"report in {write_report(folder)}", highlight=False, soft_wrap=True)
    if result.interrupted:
        console.print("[yellow]stopped before its end[/yellow] (Ctrl-C or SIGTERM)")
    console.print(f"raw records in {folder}", highlight=False, soft_wrap=True)
    return result


def has_failed(result: ComparisonResult) -> bool:
    failed = [row for row in result.rows if row.metric == "failed requests"]
    counts = [value.high for row in failed for value in row.values.values() if value]
    return bool(result.faults or result.interrupted or not result.rows or any(counts))


def _chosen(
    names: list[str],
    path: Path | None,
    policy: Policy,
    settings: tuple[str, ...],
    cores: frozenset[int] | None,
) -> list[Deployment]:
    known: dict[str, Deployment] = {}
    num_cores = len(cores or os.sched_getaffinity(0))
    for name in BUILT_IN:
        known[name] = built_in(name, policy, settings, num_cores)
    if path is not None:
        known |= {deployment.name: deployment for deployment in read_deployments(path)}
    for name in names:
        if name not in known:
            raise CliError(f"--deployment {name}: one of {', '.join(known)}")
    return [known[name] for name in names]


def _arrivals(rate: float | None, concurrency: int | None, load: float | None) -> Arrivals:
    if load is not None and (rate is not None or concurrency is not None):
        raise CliError("--load excludes --rate and --concurrency")
    if rate is None and concurrency is None:
        return ClosedLoop(8)
    return arrivals_from(rate, "poisson", concurrency)


def _rates(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        rates = (0.0,)
    if not all(rate > 0 for rate in rates):
        raise CliError(f"--sweep {text}: write it like 0.5,1,2")
    return rates


def _cores(text: str) -> frozenset[int] | None:
    try:
        cores = core_set(text)
    except ValueError as error:
        raise CliError(f"--cores: {error}") from error
    if not cores <= os.sched_getaffinity(0):
        raise CliError(f"--cores {text}: this machine lets us use "
                       f"{', '.join(map(str, sorted(os.sched_getaffinity(0))))}")  # fmt: skip
    return cores or None
