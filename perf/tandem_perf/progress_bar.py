"""The state of a running load on one line of the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from tandem_perf.load import Counts

_PERIOD_S = 0.25


@asynccontextmanager
async def load_progress(
    what: str, counts: Counts, num_requests: int | None, console: Console
) -> AsyncIterator[None]:
    """Shows finished, in flight, failed and tokens per second; nothing without a terminal."""
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        auto_refresh=False,
    )
    with progress:
        task = progress.add_task(what, total=num_requests, state="")

        async def follow() -> None:
            tokens, seen_s = counts.tokens, time.perf_counter()
            while True:
                await asyncio.sleep(_PERIOD_S)
                now_s = time.perf_counter()
                per_s = (counts.tokens - tokens) / (now_s - seen_s)
                tokens, seen_s = counts.tokens, now_s
                progress.update(
                    task, completed=counts.finished, state=_state(counts, per_s), refresh=True
                )

        follower = asyncio.create_task(follow())
        try:
            yield
        finally:
            follower.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await follower


def _state(counts: Counts, tokens_per_s: float) -> str:
    failed = f"[red]{counts.failed} failed[/red]" if counts.failed else "0 failed"
    return (
        f"{counts.finished} finished · {counts.in_flight} in flight · {failed} · "
        f"{tokens_per_s:.0f} tok/s"
    )
