"""``python -m tandem_perf.micro``: what each part costs by itself, beside what it could cost."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from tandem.errors import TandemError
from tandem_cli.errors import CliError
from tandem_cli.smollm2 import fetch_smollm2
from tandem_perf.machine import this_machine
from tandem_perf.micro.figure import Figure, MicroOptions, MicroReport
from tandem_perf.micro.parts import NAMES, run_part
from tandem_perf.micro.tables import print_noise, print_part

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    part: Annotated[str, typer.Argument(help=f"{', '.join(NAMES)}, or all.")] = "all",
    model: Annotated[
        Path | None, typer.Option(help="Directory of the model; default: SmolLM2-135M.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the engine: auto, float32, bfloat16.")] = "auto",
    device: Annotated[str, typer.Option(help="Of the engine: cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="Of the engine.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Of every figure, after a warm-up.")] = 7,
    out: Annotated[Path | None, typer.Option(help="JSON with all figures and the machine.")] = None,
) -> None:
    """Micro-benchmarks of the parts, each beside a bound measured on this machine."""
    if part not in (*NAMES, "all"):
        raise typer.BadParameter(f"{part!r}: not one of {', '.join(NAMES)}, all")
    if device not in ("cpu", "cuda"):
        raise typer.BadParameter(f"device {device!r}: not one of cpu, cuda")
    logging.basicConfig(format="%(message)s")
    if device != "cpu":  # which attention runs, and whether there are decode graphs
        logging.getLogger("tandem").setLevel(logging.INFO)
    console = Console()
    before = this_machine()
    figures: list[Figure] = []
    try:
        options = MicroOptions(model or fetch_smollm2(), dtype, threads, repeats, device)
        for name in NAMES if part == "all" else (part,):
            with console.status(f"measuring {name}"):
                new = list(run_part(name, options))
            print_part(new, console)
            figures += new
    except (TandemError, CliError) as error:
        console.print(f"[red]error:[/red] {error}", highlight=False)
        raise typer.Exit(1) from error
    print_noise(before, this_machine(), figures, console)
    if out is not None:
        report = MicroReport(machine=before, figures=figures)
        out.write_bytes(msgspec.json.format(msgspec.json.encode(report)))


if __name__ == "__main__":
    app()
