"""Which network UCX may use where there is no RDMA device."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import psutil

_RDMA_DEVICES = Path("/sys/class/infiniband")


def interface_of(
    host: str, environ: Mapping[str, str] = os.environ, rdma_devices: Path = _RDMA_DEVICES
) -> str:
    """The interface that has the address ``host``: else UCX offers every one, also a bridge that
    other hosts cannot reach. Empty if ``UCX_NET_DEVICES`` or an RDMA device decides.
    """
    if "UCX_NET_DEVICES" in environ or (rdma_devices.is_dir() and any(rdma_devices.iterdir())):
        return ""
    addresses: dict[str, list[str]] = {
        name: [entry.address for entry in entries]
        for name, entries in psutil.net_if_addrs().items()
    }
    return next((name for name, known in addresses.items() if host in known), "")
