"""Engines side by side in this machine's one run: ``python -m tandem_perf.engine_speed``.

Tandem's engine without a server, and, with ``--vllm PYTHON``, vLLM's in the Python it is installed
in; in turn, round after round, with the same prompts and the same number of threads.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tandem_cli.smollm2 import fetch_smollm2
from tandem_perf.engine_cases import Kind, cases

_EXAMPLES = Path(__file__).parent.parent / "examples"
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    model: Annotated[
        Path | None, typer.Option(help="Directory of the model; default: SmolLM2-135M.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Of each engine, on the first cores.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="A B A B ...")] = 2,
    repeats: Annotated[int, typer.Option(min=1, help="Of every figure in a round.")] = 3,
    quantization: Annotated[str, typer.Option(help="Of Tandem: none or int8.")] = "none",
    vllm: Annotated[
        Path | None, typer.Option(help="Python that has vLLM: it is measured in turn.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="JSON with the figures of every round.")] = None,
) -> None:
    """Decode and prefill of one engine, in process."""
    console = Console()
    arguments = json.dumps(
        {
            "model": str(model or fetch_smollm2()),
            "threads": threads,
            "repeats": repeats,
            "quantization": quantization,
        }
    )
    commands = {"tandem": [sys.executable, "-m", "tandem_perf.engine_run"]}
    if vllm is not None:
        commands["vllm"] = [str(vllm), str(_EXAMPLES / "vllm_engine_run.py")]
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    for round_number in range(1, rounds + 1):
        for name, command in commands.items():
            with console.status(f"round {round_number} of {rounds}: {name}"):
                figures[name].append(_run(command, arguments))
    _print(figures, threads, console)
    if out is not None:
        out.write_text(json.dumps({"threads": threads, "rounds": figures}, indent=1))


def _run(command: list[str], arguments: str) -> dict[str, float]:
    """The last line of the output: every figure by name."""
    environment = os.environ | {"TANDEM_PERF_PATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(
        [*command, arguments], env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with exit code {done.returncode}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def _print(figures: dict[str, list[dict[str, float]]], threads: int, console: Console) -> None:
    table = Table(title=f"one engine, {threads} thread(s); median (min–max) over the rounds")
    table.add_column("what")
    table.add_column("unit")
    for name in figures:
        table.add_column(name, justify="right")
    table.add_column("better by", justify="right")
    for case in cases():
        cells: list[Any] = [case.name, "tokens/s" if case.kind is Kind.GENERATE else "ms"]
        cells += [_spread([r[case.name] for r in rounds]) for rounds in figures.values()]
        cells.append(_ratio(figures, case.name, case.kind))
        table.add_row(*cells)
    console.print(table)


def _spread(values: list[float]) -> str:
    ordered = sorted(values)
    return f"{ordered[len(ordered) // 2]:.1f} ({ordered[0]:.1f}–{ordered[-1]:.1f})"


def _ratio(figures: dict[str, list[dict[str, float]]], name: str, kind: Kind) -> str:
    """Within a round, so that a slow minute of the machine favours nobody."""
    if "vllm" not in figures:
        return ""
    pairs = zip(figures["tandem"], figures["vllm"], strict=True)
    ratios = [b[name] / a[name] for a, b in pairs]
    if kind is Kind.GENERATE:
        ratios = [1 / ratio for ratio in ratios]
    return f"{min(ratios):.2f}–{max(ratios):.2f}×"


if __name__ == "__main__":
    app()
