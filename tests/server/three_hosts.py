"""Three network namespaces on one wire: the hosts of a router and of two pools.

A process on one of them is started with ``two_hosts.on_host``; the test itself is on none, and
goes there with ``inside``.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HOSTS = ("router", "prefill", "decode")
ADDRESSES = {host: f"10.213.78.{number}" for number, host in enumerate(HOSTS, start=1)}
_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)


@contextmanager
def three_hosts() -> Iterator[dict[str, str]]:
    """The names of their namespaces, by host; the router's holds the bridge between them."""
    names = {host: f"tandem-{os.getpid()}-{host}" for host in HOSTS}
    made: list[str] = []
    try:
        for name in names.values():
            _ip("netns", "add", name)
            made.append(name)
            _ip("-n", name, "link", "set", "lo", "up")
        router = names["router"]
        _ip("-n", router, "link", "add", "wire", "type", "bridge")
        for host in HOSTS[1:]:
            end = ["type", "veth", "peer", "name", "wire", "netns", names[host]]
            _ip("-n", router, "link", "add", host, *end)
            _ip("-n", router, "link", "set", host, "master", "wire", "up")
        for host, name in names.items():
            _ip("-n", name, "address", "add", f"{ADDRESSES[host]}/24", "dev", "wire")
            _ip("-n", name, "link", "set", "wire", "up")
        yield names
    finally:
        for name in made:
            _ip("netns", "delete", name)


@contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Sockets that this thread, or one it starts, makes meanwhile are on that host."""
    with open("/proc/thread-self/ns/net") as here, Path("/run/netns", namespace).open() as there:
        _enter(there.fileno())
        try:
            yield
        finally:
            _enter(here.fileno())


def _enter(descriptor: int) -> None:
    if _LIBC.setns(descriptor, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
