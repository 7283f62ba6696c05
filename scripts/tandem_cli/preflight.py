"""Checks before a server starts; each message says what to do."""

from __future__ import annotations

import os
from pathlib import Path

from tandem_cli.errors import CliError

MIB = 1 << 20
REGION_BYTES = 1 * MIB  # of one instance of a Python model, in /dev/shm


def check_model(model: Path) -> None:
    """Raises unless ``model`` is a Hugging Face model folder with safetensors."""
    if not model.is_dir():
        raise CliError(f"--model {model}: no such directory (or use the name smollm2)")
    for name in ("config.json", "tokenizer.json"):
        if not (model / name).is_file():
            raise CliError(f"--model {model}: no {name} in this directory")
    if not any(model.glob("*.safetensors")):
        raise CliError(f"--model {model}: no *.safetensors in this directory")


def check_shared_memory(num_instances: int, shm: Path = Path("/dev/shm")) -> None:
    """Raises when Triton's regions would not fit: it would die later, with a bus error."""
    needed = 2 * MIB + num_instances * REGION_BYTES
    stats = os.statvfs(shm)
    free = stats.f_bavail * stats.f_frsize
    if free >= needed:
        return
    size = stats.f_blocks * stats.f_frsize
    advised = max(64, -(-(size - free + needed) // MIB) + 16)
    raise CliError(
        f"{shm} has {free // MIB} MB free, {num_instances} Triton model instances need "
        f"{needed // MIB} MB. Make it larger: `docker run --shm-size={advised}m ...`, in "
        f"Kubernetes an emptyDir volume with medium Memory at {shm}, elsewhere "
        f"`mount -o remount,size={advised}m {shm}`."
    )
