"""Two network namespaces joined by a veth pair: two hosts, with a link that can be cut.

UCX reads /sys/class/net, which belongs to the namespace that mounted it, so a process has to be
started in its namespace (``ip netns exec`` mounts anew): tests of the near host are a pytest of
their own, which finds the name of the far host in its environment.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

FAR_HOST = os.environ.get("TANDEM_TEST_FAR_HOST", "")  # set if this process is on the near host
NEAR_ADDRESS, FAR_ADDRESS = "10.213.77.1", "10.213.77.2"
_LINK = "veth0"
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


@cache
def why_not() -> str:
    """Why there cannot be two hosts here; empty if there can."""
    if shutil.which("ip") is None:
        return "no ip command (Debian: iproute2)"
    try:
        with two_hosts():
            return ""
    except subprocess.CalledProcessError as error:
        return f"no network namespaces: {error.stderr.decode().strip()}"


@contextmanager
def two_hosts() -> Iterator[tuple[str, str]]:
    """Names of the near and the far host."""
    near, far = (f"tandem-{os.getpid()}-{side}" for side in ("near", "far"))
    made: list[str] = []
    try:
        for name in (near, far):
            _ip("netns", "add", name)
            made.append(name)
            _ip("-n", name, "link", "set", "lo", "up")
        end = ["type", "veth", "peer", "name", _LINK, "netns", far]
        _ip("-n", near, "link", "add", _LINK, *end)
        for name, address in ((near, NEAR_ADDRESS), (far, FAR_ADDRESS)):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", _LINK)
            _ip("-n", name, "link", "set", _LINK, "up")
        yield near, far
    finally:
        for name in made:
            _ip("netns", "delete", name)


def on_host(name: str) -> list[str]:
    """The beginning of a command line."""
    return ["ip", "netns", "exec", name]


class Link:
    """The near end of the wire between the hosts."""

    def cut(self) -> None:
        """At once: a command would take longer than a pull."""
        self._set(is_up=False)

    def join(self) -> None:
        self._set(is_up=True)

    def _set(self, *, is_up: bool) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            request = struct.pack("16sh14x", _LINK.encode(), 0)
            answer = fcntl.ioctl(control, _SIOCGIFFLAGS, request)
            (flags,) = struct.unpack_from("h", answer, 16)
            flags = flags | _IFF_UP if is_up else flags & ~_IFF_UP
            fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh14x", _LINK.encode(), flags))


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
