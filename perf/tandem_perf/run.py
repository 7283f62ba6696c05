"""One measured run: warm-up, load, records, timeline, summary."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from rich.console import Console

from tandem_perf import event_loop
from tandem_perf.arrivals import ClosedLoop, TraceArrivals, describe
from tandem_perf.load import Load, LoadOptions
from tandem_perf.machine import this_machine
from tandem_perf.prepared_load import PreparedLoad
from tandem_perf.progress_bar import load_progress
from tandem_perf.records import RecordWriter, RequestRecord
from tandem_perf.run_clock import RunClock
from tandem_perf.run_config import RunConfig
from tandem_perf.server_watch import ServerWatch
from tandem_perf.statistics import statistics_of
from tandem_perf.stop_signals import stop_on_signals
from tandem_perf.summary import Summary, write_json
from tandem_perf.targets.base import Target
from tandem_perf.targets.registry import open_target

RECORDS, TIMELINE, SUMMARY = "records.jsonl", "timeline.jsonl", "summary.json"
_WARM_UP_CONCURRENCY = 4


def run_load(config: RunConfig, console: Console) -> Summary:
    """Writes records.jsonl, timeline.jsonl and summary.json to ``config.out_dir``.

    Ctrl-C ends the load; what was recorded until then is kept and summarized. Raises
    WorkloadError, TargetError for a bad configuration; a target that fails raises nothing, it
    is in the records.
    """
    prepared = PreparedLoad(config)
    config.out_dir.mkdir(parents=True, exist_ok=True)
    return event_loop.run(_run(config, prepared, console))


async def _run(config: RunConfig, prepared: PreparedLoad, console: Console) -> Summary:
    target = open_target(config.target, config.target_options)
    watch = ServerWatch(config.metrics_url, config.server_pid)
    try:
        num_failed = await _warm_up(config, prepared, target, console)
        watch.prepare()
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        clock = RunClock()
        if config.metrics_url or config.server_pid:
            watch.start(config.out_dir / TIMELINE, clock)
        records, was_stopped = await _measure(config, prepared, target, clock, console)
        num_tokens = sum(len(record.token_times_s) for record in records)
        server = await asyncio.to_thread(watch.finish, num_tokens)
    finally:
        watch.close()
        await target.aclose()
    arrivals = config.arrivals
    summary = Summary(
        deployment=config.deployment,
        workload=prepared.workload.name,
        target=config.target,
        url=config.target_options.url,
        arrivals=describe(arrivals),
        rate=None if isinstance(arrivals, ClosedLoop | TraceArrivals) else arrivals.rate,
        concurrency=arrivals.concurrency if isinstance(arrivals, ClosedLoop) else None,
        seed=config.seed,
        request_digest=str(prepared.digest),
        requests_prepared=prepared.digest.num_requests,
        slo=config.slo.limits_s,
        started_at=started_at,
        interrupted=was_stopped,
        warm_up=config.warm_up,
        warm_up_failed=num_failed,
        statistics=statistics_of(records, config.slo),
        server_side=server if config.metrics_url or config.server_pid else None,
        machine=this_machine(),
    )
    write_json(config.out_dir / SUMMARY, summary)
    return summary


async def _warm_up(
    config: RunConfig, prepared: PreparedLoad, target: Target, console: Console
) -> int:
    """The number of warm-up requests that failed."""
    load = Load(target, _load_options(config, prepared), RunClock(), lambda record: None)
    with stop_on_signals(load):
        async with load_progress("warm-up", load.counts, config.warm_up, console):
            await load.run_closed(prepared.warm_up_sessions(), _WARM_UP_CONCURRENCY)
    if load.was_stopped:
        raise KeyboardInterrupt
    return load.counts.failed


async def _measure(
    config: RunConfig, prepared: PreparedLoad, target: Target, clock: RunClock, console: Console
) -> tuple[list[RequestRecord], bool]:
    records: list[RequestRecord] = []
    with RecordWriter(config.out_dir / RECORDS) as writer:

        def keep(record: RequestRecord) -> None:
            records.append(record)
            writer.write(record)

        load = Load(target, _load_options(config, prepared), clock, keep)
        what = f"{config.deployment} · {prepared.workload.name} · {describe(config.arrivals)}"
        with stop_on_signals(load):
            async with load_progress(what, load.counts, prepared.num_requests, console):
                if isinstance(config.arrivals, ClosedLoop):
                    await load.run_closed(prepared.sessions, config.arrivals.concurrency)
                else:
                    await load.run_open(prepared.schedule)
    return records, load.was_stopped


def _load_options(config: RunConfig, prepared: PreparedLoad) -> LoadOptions:
    return LoadOptions(
        deployment=config.deployment,
        workload=prepared.workload.name,
        timeout_s=config.target_options.timeout_s,
        duration_s=float("inf") if config.duration_s is None else config.duration_s,
        max_in_flight=config.max_in_flight,
    )
