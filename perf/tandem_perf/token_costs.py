"""TTFT, ITL and CPU time per token of a server of its own: ``python -m tandem_perf.token_costs``.

The first table is one request at a time; the second one is the CPU time that each process of the
server spends on a token while 16 streams decode.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from tandem_cli.server import TandemServer
from tandem_client import TandemClient
from tandem_perf.processes import ProcessTree, ProcessUsage

PROMPT_LENGTHS = (64, 1024)
OUTPUT_TOKENS = 64
ROUNDS = 3
NUM_STREAMS = 16
_FIRST_ID, _LAST_ID = 1000, 40000  # ordinary text tokens of SmolLM2


@dataclass
class Run:
    """One streamed answer: seconds to the first chunk, and between chunks."""

    ttft_s: float
    gaps_s: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return len(self.gaps_s) / sum(self.gaps_s)


def stream_once(client: TandemClient, prompt_ids: list[int]) -> Run:
    started_s = last_s = time.perf_counter()
    run: Run | None = None
    for _ in client.stream(
        input_ids=prompt_ids,
        max_tokens=OUTPUT_TOKENS,
        temperature=0.0,
        ignore_eos=True,
        return_output_ids=True,  # one chunk a token, also where it adds no text
    ):
        now_s = time.perf_counter()
        if run is None:
            run = Run(ttft_s=now_s - started_s)
        else:
            run.gaps_s.append(now_s - last_s)
        last_s = now_s
    assert run is not None
    return run


def random_prompt(length: int) -> list[int]:
    """Random ids, so that no prefix cache helps."""
    return [random.randrange(_FIRST_ID, _LAST_ID) for _ in range(length)]


def latency_table(client: TandemClient, path: str) -> Table:
    table = Table(title=f"one request at a time, {path} (median of {ROUNDS}, min–max)")
    for title in ("prompt tokens", "TTFT ms", "ITL p50 ms", "ITL p99 ms", "tokens/s"):
        table.add_column(title, justify="right")
    for length in PROMPT_LENGTHS:
        runs = [stream_once(client, random_prompt(length)) for _ in range(ROUNDS)]
        gaps = sorted(gap for run in runs for gap in run.gaps_s)
        table.add_row(
            str(length),
            _spread([run.ttft_s * 1e3 for run in runs]),
            f"{statistics.median(gaps) * 1e3:.1f}",
            f"{gaps[int(len(gaps) * 0.99)] * 1e3:.1f}",
            _spread([run.tokens_per_s for run in runs]),
        )
    return table


def cpu_table(client: TandemClient, server_pid: int) -> Table:
    processes = ProcessTree(server_pid)
    before = processes.usage()
    started_s = time.perf_counter()
    threads = [
        threading.Thread(target=stream_once, args=(client, random_prompt(16)))
        for _ in range(NUM_STREAMS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall_s = time.perf_counter() - started_s
    after = processes.usage()
    num_tokens = NUM_STREAMS * OUTPUT_TOKENS
    table = Table(title=f"{NUM_STREAMS} streams, {num_tokens / wall_s:.0f} tokens/s in all")
    table.add_column("process")
    table.add_column("CPU µs per token", justify="right")
    for name in sorted(after):
        spent_s = after[name].cpu_s - before.get(name, ProcessUsage()).cpu_s
        table.add_row(name, f"{spent_s / num_tokens * 1e6:.0f}")
    return table


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f}–{max(values):.1f})"


def main() -> None:
    console = Console()
    for policy in ("always", "never"):
        with (
            TandemServer(
                policy=policy, log_level="warning", http_port=0, grpc_port=0, metrics_port=0
            ) as server,
            TandemClient(f"grpc://{server.grpc_address}") as client,
        ):
            stream_once(client, random_prompt(64))
            console.print(latency_table(client, f"policy {policy}"))
            console.print(cpu_table(client, server.pid))


if __name__ == "__main__":
    main()
