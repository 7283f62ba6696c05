"""The ``tandem`` program. Commands import what they need when they run."""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.core import TyperGroup

from tandem_cli.errors import CliError
from tandem_cli.fetch import fetch


class Commands(TyperGroup):
    """Shows a ``CliError`` as one message with exit status 1."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except CliError as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(1) from error


app = typer.Typer(
    cls=Commands,
    help="Disaggregated LLM serving inside NVIDIA Triton.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(fetch)


@app.callback()
def main() -> None:
    pass
