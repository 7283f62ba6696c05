"""``tandem bench``: measures a deployment, or a server of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tandem.types import Policy
from tandem_cli.errors import CliError
from tandem_perf.arrivals import ClosedLoop, TraceArrivals
from tandem_perf.bench_arguments import DEFAULT_RATE, arrivals_from, slo_from, token_range_from
from tandem_perf.compare import compare
from tandem_perf.find_rate import find_rate
from tandem_perf.rate_search import RateSearch
from tandem_perf.report import report
from tandem_perf.run import run_load
from tandem_perf.run_config import RunConfig
from tandem_perf.slo import MEASURES
from tandem_perf.tables import print_search, print_summary
from tandem_perf.targets.base import TargetError, TargetOptions
from tandem_perf.targets.registry import NAMES as TARGETS
from tandem_perf.targets.registry import target_for
from tandem_perf.workloads.base import WorkloadError, WorkloadOptions
from tandem_perf.workloads.registry import NAMES as WORKLOADS

bench = typer.Typer(
    name="bench",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench.command("compare")(compare)
bench.command("report")(report)


@bench.callback()
def main(
    context: typer.Context,
    url: Annotated[
        str | None,
        typer.Option(help="grpc://, http:// or https://. Without it a server is started."),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help=f"{', '.join(TARGETS)}; default: Triton's by the URL.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Name of the model at the target.")
    ] = None,
    workload: Annotated[str, typer.Option(help=", ".join(WORKLOADS))] = "mixed-60-40",
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, help=f"Open loop, sessions/s (default {DEFAULT_RATE:g})."),
    ] = None,
    arrivals: Annotated[
        str, typer.Option(help="Of an open loop: poisson, constant, or trace (times of a file).")
    ] = "poisson",
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Closed loop: so many users, one request each.")
    ] = None,
    num_requests: Annotated[
        int | None, typer.Option(min=1, help="Default 60, or what --duration or a file gives.")
    ] = None,
    duration: Annotated[
        float | None, typer.Option(min=0.1, help="Seconds after which nothing more is sent.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same requests.")] = 0,
    slo: Annotated[
        str, typer.Option(help=f"E.g. ttft=0.5,tpot=100ms. Known: {', '.join(MEASURES)}.")
    ] = "",
    find: Annotated[
        bool, typer.Option("--find-rate", help="Search the highest rate that meets --slo.")
    ] = False,
    attainment: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Share of requests that must meet --slo.")
    ] = 0.9,
    trial: Annotated[
        float, typer.Option(min=1, help="Seconds of one trial of --find-rate.")
    ] = 15.0,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before the run.")] = 4,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for a whole answer.")] = 120.0,
    max_in_flight: Annotated[
        int, typer.Option(min=1, help="Requests beyond it are recorded as errors.")
    ] = 10_000,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="tokenizer.json: send text of the exact length, not token ids."),
    ] = None,
    token_ids: Annotated[
        str, typer.Option(metavar="FIRST:LAST", help="Ids that random prompts are made of.")
    ] = "1000:40000",
    ignore_eos: Annotated[bool, typer.Option(help="Answers have their full length.")] = True,
    speed: Annotated[float, typer.Option(min=0.001, help="2: a trace twice as fast.")] = 1.0,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Leave longer requests of a trace out.")
    ] = None,
    metrics_url: Annotated[
        str | None, typer.Option(help="Prometheus metrics of the server at --url.")
    ] = None,
    server_pid: Annotated[
        int | None, typer.Option(help="Process whose CPU and memory, and children's, to measure.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="Of an OpenAI target.")
    ] = None,
    policy: Annotated[
        Policy, typer.Option(help="Of the server that is started.")
    ] = Policy.AUTO,
    name: Annotated[str | None, typer.Option(help="Name of the deployment in results.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results (default bench-results/<time>).")
    ] = None,
) -> None:
    """Send a workload to a server and measure it: TTFT, ITL, TPOT, throughput, goodput, CPU.

    Latencies count from when a request was due. Exits with 1 if a request failed, or no rate
    met the SLO.
    """
    if context.invoked_subcommand:
        return
    console = Console()
    chosen = arrivals_from(rate, arrivals, concurrency)
    objectives = slo_from(slo)
    if find and (not objectives.limits_s or isinstance(chosen, ClosedLoop | TraceArrivals)):
        raise CliError("--find-rate needs --slo, and neither --concurrency nor --arrivals trace")
    config = RunConfig(
        target=target or target_for(url or "grpc://"),
        target_options=TargetOptions(
            url=url or "", model=model, timeout_s=timeout, api_key=api_key
        ),
        workload=workload,
        workload_options=WorkloadOptions(
            token_range=token_range_from(token_ids), speed=speed,
            max_prompt_tokens=max_prompt_tokens, ignore_eos=ignore_eos,
        ),
        arrivals=chosen,
        out_dir=out or Path("bench-results") / datetime.now().strftime("%Y%m%d-%H%M%S"),
        deployment=name or (f"tandem {policy}" if url is None else url),
        tokenizer=tokenizer, num_requests=num_requests, duration_s=duration, seed=seed,
        warm_up=warmup, max_in_flight=max_in_flight, slo=objectives,
        metrics_url=metrics_url, server_pid=server_pid,
    )  # fmt: skip
    search = Search(attainment, trial) if find else None
    with _user_faults(), _server(config, url, policy, console) as ready:
        has_failed = measure(ready, search, console)
    raise typer.Exit(1 if has_failed else 0)


@dataclass(frozen=True)
class Search:
    min_attainment: float
    trial_s: float


def measure(config: RunConfig, search: Search | None, console: Console) -> bool:
    """Runs, prints the tables and where the files are; returns whether something failed."""
    if search is None:
        summary = run_load(config, console)
        print_summary(summary, console)
        has_failed = summary.has_failed
    else:
        assert not isinstance(config.arrivals, ClosedLoop | TraceArrivals)
        rates = RateSearch(config.arrivals.rate, min_attainment=search.min_attainment)
        best = find_rate(config, rates, search.min_attainment, search.trial_s, console)
        if best is not None:
            print_summary(best, console)
        print_search(rates, console)
        has_failed = best is None
    console.print(f"results in {config.out_dir}", highlight=False)
    return has_failed


@contextlib.contextmanager
def _server(
    config: RunConfig, url: str | None, policy: Policy, console: Console
) -> Iterator[RunConfig]:
    """The configuration for a server that is ready: the user's, or one that ends with this."""
    if url is not None:
        yield config
        return
    from tandem_cli.server import TandemServer

    config.out_dir.mkdir(parents=True, exist_ok=True)
    with (config.out_dir / "server.log").open("w") as log:
        server = TandemServer(
            policy=policy, http_port=0, grpc_port=0, metrics_port=0,
            log=lambda line: print(line, file=log, flush=True),
        )  # fmt: skip
        with contextlib.ExitStack() as stack:
            with console.status("starting a server"):
                stack.enter_context(server)
            is_http = config.target == "triton-http"
            address = server.http_url if is_http else f"grpc://{server.grpc_address}"
            yield replace(
                config,
                target_options=replace(config.target_options, url=address),
                metrics_url=server.metrics_url,
                server_pid=server.pid,
            )


@contextlib.contextmanager
def _user_faults() -> Iterator[None]:
    try:
        yield
    except (WorkloadError, TargetError) as error:
        raise CliError(str(error)) from error
