"""``tandem serve``: the server in the foreground."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from tandem.types import Policy
from tandem_cli.options import ServerOptions
from tandem_cli.roles import ServerRole
from tandem_cli.server import TandemServer
from tandem_cli.watchdog import ServerBroken, Watchdog

DEFAULTS = ServerOptions()
REPORT_EVERY_S = 10.0
CHECK_EVERY_S = 0.5


class StopRequested(BaseException):
    """SIGTERM, SIGINT or SIGHUP; not an Exception, so that nothing on the way swallows it."""


def serve(
    model: Annotated[
        str, typer.Option(help="Directory of a Hugging Face model, or smollm2.")
    ] = DEFAULTS.model,
    role: Annotated[
        ServerRole, typer.Option(help="What this server does; the others are on other hosts.")
    ] = DEFAULTS.role,
    profile: Annotated[
        str, typer.Option(help="Hardware profile: configs/<profile>.pbtxt of the models.")
    ] = DEFAULTS.profile,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = DEFAULTS.host,
    http_port: Annotated[int, typer.Option(help="0 picks a free port.")] = DEFAULTS.http_port,
    grpc_port: Annotated[int, typer.Option(help="0 picks a free port.")] = DEFAULTS.grpc_port,
    metrics_port: Annotated[int, typer.Option(help="0 picks a free port.")] = DEFAULTS.metrics_port,
    policy: Annotated[
        Policy, typer.Option(help="When a prompt goes to the prefill pool.")
    ] = DEFAULTS.policy,
    prefill_instances: Annotated[
        int | None,
        typer.Option(min=0, help="Engines of the prefill pool (default 1; policy never: 0)."),
    ] = None,
    decode_instances: Annotated[
        int | None, typer.Option(min=1, help="Engines of the decode pool (default 1).")
    ] = None,
    log_level: Annotated[
        str, typer.Option(help="debug, info, warning or error.")
    ] = DEFAULTS.log_level,
    drain_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds that running requests have to end at a stop.")
    ] = DEFAULTS.drain_timeout_s,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="[MODEL.]KEY=VALUE", help="A parameter of the models."),
    ] = None,
    model_repository: Annotated[
        Path, typer.Option(help="Repository that the working copy is made from.")
    ] = DEFAULTS.model_repository,
) -> None:
    """Start Triton with Tandem's models; Ctrl-C stops it.

    Once all models are loaded one line goes to stdout: "ready http=... grpc=...". The log is on
    stderr. A second Ctrl-C does not wait for running requests. The exit status is not 0 where the
    server ended by itself or cannot serve any more.
    """
    console = Console(stderr=True, highlight=False)
    server = TandemServer(
        log=log_printer(console), model=model, role=role, profile=profile, host=host,
        http_port=http_port, grpc_port=grpc_port, metrics_port=metrics_port, policy=policy,
        prefill_instances=prefill_instances, decode_instances=decode_instances,
        log_level=log_level, drain_timeout_s=drain_timeout, settings=settings or (),
        model_repository=model_repository,
    )  # fmt: skip

    def on_ready() -> None:
        print(server.ready_line(), flush=True)

    raise typer.Exit(run_foreground(server, console, on_ready))


def run_foreground(server: TandemServer, console: Console, on_ready: Callable[[], None]) -> int:
    """Runs the server until it ends or a signal comes; returns the exit code of the program."""
    with stop_signals(server):
        try:
            server.start()
            wait_with_status(server, console)
            on_ready()
            return exit_code(watch(server))
        except StopRequested:
            return 0
        except ServerBroken as error:
            print(f"error: {error}; the server ends", file=sys.stderr, flush=True)
            server.kill()  # what hangs in it would hold up an orderly stop
            return 1
        finally:
            server.stop()


def watch(server: TandemServer) -> int | None:
    """Returns the server's status once it ended; raises ``StopRequested`` or ``ServerBroken``."""
    watchdog = Watchdog(server, lambda line: print(line, file=sys.stderr, flush=True))
    while (status := server.wait(CHECK_EVERY_S)) is None:
        if server.is_drain_requested:
            raise StopRequested
        watchdog.check()
    return status


@contextmanager
def stop_signals(server: TandemServer) -> Iterator[None]:
    """The first signal raises ``StopRequested`` in the main thread, the next one kills."""
    num_signals = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal num_signals
        num_signals += 1
        if num_signals == 1:
            print("stopping (again: at once)", file=sys.stderr, flush=True)
            raise StopRequested
        server.kill()

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def wait_with_status(server: TandemServer, console: Console) -> None:
    """Waits until the server is ready; shows the elapsed time and the models that are loaded."""

    def text(elapsed_s: float) -> str:
        loaded = ", ".join(server.loaded_models)  # known from the log at level info only
        return f"starting, {elapsed_s:.0f} s" + (f"; models loaded: {loaded}" if loaded else "")

    if console.is_terminal:
        with console.status(text(0)) as status:
            server.wait_ready(on_wait=lambda elapsed_s: status.update(text(elapsed_s)))
        return
    next_report = time.monotonic() + REPORT_EVERY_S

    def report(elapsed_s: float) -> None:
        nonlocal next_report
        if time.monotonic() >= next_report:
            next_report += REPORT_EVERY_S
            print(text(elapsed_s), file=sys.stderr, flush=True)

    server.wait_ready(on_wait=report)


def log_printer(console: Console) -> Callable[[str], None]:
    """Prints the server's log below which the status line stays."""

    def print_line(line: str) -> None:
        if console.is_terminal:
            console.print(line, markup=False, soft_wrap=True)
        else:
            print(line, file=sys.stderr, flush=True)

    return print_line


def exit_code(status: int | None) -> int:
    """Of a server that ended without being asked: never 0; 128 + number for a signal."""
    if status is None or status == 0:
        return 1
    return 128 - status if status < 0 else status
