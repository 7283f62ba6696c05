"""The three ports of a server: checked, or picked, before it starts."""

from __future__ import annotations

import errno
import random
import socket
from contextlib import ExitStack
from dataclasses import dataclass

from tandem_cli.errors import CliError

# Below the range the kernel takes for outgoing connections: nothing grabs a picked port there.
PICK_FROM = range(20_000, 32_000)


@dataclass(frozen=True, kw_only=True)
class Ports:
    http: int
    grpc: int
    metrics: int


def choose_ports(host: str, wanted: Ports, rng: random.Random) -> Ports:
    """``wanted`` with every 0 replaced by a free port; a port in use is an error."""
    with ExitStack() as held:  # all at once, so that no port is picked twice

        def choose(option: str, port: int) -> int:
            for _ in range(100):
                candidate = port or rng.choice(PICK_FROM)
                try:
                    held.enter_context(_bind(host, candidate))
                    return candidate
                except OSError as error:
                    if port or error.errno != errno.EADDRINUSE:
                        raise CliError(
                            f"--{option} {candidate}: cannot listen on {host}:{candidate}: "
                            f"{error.strerror}. Choose another port; 0 picks a free one."
                        ) from error
            raise CliError(f"--{option} 0: no free port found on {host}")

        return Ports(
            http=choose("http-port", wanted.http),
            grpc=choose("grpc-port", wanted.grpc),
            metrics=choose("metrics-port", wanted.metrics),
        )


def _bind(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1)  # only a listening socket keeps others with SO_REUSEADDR off
    except OSError:
        listener.close()
        raise
    return listener
