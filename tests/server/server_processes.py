"""The processes of one running server, to watch and to kill."""

from __future__ import annotations

import psutil

from tandem_cli.server import TandemServer


def processes(server: TandemServer) -> dict[str, psutil.Process]:
    """tritonserver, the stub of every model instance and its engine, by name: "tritonserver",
    "decode_0_0", "engine decode_0_0".
    """
    root = psutil.Process(server.pid)
    found = {"tritonserver": root}
    for stub in root.children():
        if stub.status() == psutil.STATUS_ZOMBIE:
            continue
        name = _instance(stub)
        found[name] = stub
        found |= {f"engine {name}": child for child in stub.children()}
    return found


def engine(server: TandemServer, worker: str) -> psutil.Process:
    return processes(server)[f"engine {worker}"]


def has_engine(server: TandemServer, worker: str) -> bool:
    return f"engine {worker}" in processes(server)


def _instance(stub: psutil.Process) -> str:
    """A stub's command ends with the name of its model instance and a word."""
    return str(stub.cmdline()[-2])
