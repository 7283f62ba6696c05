"""The ``tandem`` program. A command's module is imported only when that command is used."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from tandem_cli.errors import CliError

COMMANDS = {
    "run": "tandem_cli.run",
    "serve": "tandem_cli.serve",
    "fetch": "tandem_cli.fetch",
    "health": "tandem_cli.health",
    "drain": "tandem_cli.drain",
    "generate": "tandem_client.cli",  # needs neither torch nor the server's package
    "chat": "tandem_client.cli",
    "bench": "tandem_perf.bench",  # a group: ``tandem bench`` measures, its commands do more
}


class Commands(TyperGroup):
    """Finds a command in its module; shows a ``CliError`` as one message, exit status 1."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        command = getattr(import_module(COMMANDS[cmd_name]), cmd_name)
        if isinstance(command, typer.Typer):
            return typer.main.get_command(command)
        program = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        program.command(cmd_name)(command)
        return typer.main.get_command(program)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except CliError as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(1) from error


app = typer.Typer(
    cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)


@app.callback()
def main() -> None:
    """Disaggregated LLM serving inside NVIDIA Triton."""
