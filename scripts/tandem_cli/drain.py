"""``tandem drain``: an orderly end of a server on this machine, without a signal."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from tandem.drain import is_drained, request_drain, requested_grace_s
from tandem_cli.errors import CliError

MARGIN_S = 5.0


def drain(
    runtime_dir: Annotated[
        Path | None, typer.Option(help="Of the server (TANDEM_RUNTIME_DIR); default: the only one.")
    ] = None,
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds that running requests have to end.")
    ] = 30.0,
) -> None:
    """Refuse new requests, let the running ones end, and end those that do not.

    A server of `tandem serve` then exits with status 0. A plain tritonserver goes on refusing until
    it gets its SIGTERM: make this its preStop hook.
    """
    directory = runtime_dir or only_server()
    if not any(directory.glob("stream-*")):
        raise CliError(f"{directory}: no server runs there")
    request_drain(directory, grace)
    deadline = time.monotonic() + (requested_grace_s(directory) or grace) + MARGIN_S
    while directory.exists() and not is_drained(directory):
        if time.monotonic() > deadline:
            raise CliError(f"the server of {directory} still has requests")
        time.sleep(0.05)
    print("drained")


def only_server(parent: Path = Path("/tmp")) -> Path:
    """The runtime directory of this user's running server; an error unless there is one."""
    found = {socket.parent for socket in parent.glob(f"tandem-{os.getuid()}-*/stream-*")}
    if len(found) != 1:
        names = ", ".join(sorted(map(str, found))) or "none"
        raise CliError(f"which server? Name it with --runtime-dir; running: {names}")
    return found.pop()
