"""The shared libpython that Triton's Python stub links against."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from tandem_cli.errors import CliError

SUPPORTED = ((3, 11), (3, 12))  # the stub of 3.13 crashes with every numpy that 3.13 can have


def python_version() -> str:
    """``major.minor`` of the running Python; an error when there is no stub for it."""
    if sys.version_info[:2] not in SUPPORTED:
        raise CliError(
            f"Python {sys.version_info.major}.{sys.version_info.minor} is not supported; "
            f"use one of {', '.join(f'{major}.{minor}' for major, minor in SUPPORTED)}"
        )
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def libpython_folder(candidates: Sequence[Path] | None = None) -> Path:
    """The folder of ``libpythonX.Y.so.1.0`` of the running Python."""
    version = python_version()
    name = f"libpython{version}.so.1.0"
    searched = _candidates() if candidates is None else candidates
    for folder in searched:
        if (folder / name).is_file():
            return folder
    raise CliError(
        f"{name} is missing: Triton embeds Python and needs it as a shared library.\n"
        f"Searched: {', '.join(map(str, searched))}\n"
        f"On Debian or Ubuntu run `apt install libpython{version}`; a Python that you build "
        "yourself needs `./configure --enable-shared` (pyenv: "
        "PYTHON_CONFIGURE_OPTS=--enable-shared). Then make the virtual environment again."
    )


def environment_bin() -> Path:
    """The folder whose ``python3`` is the running Python: the stub finds its packages by it."""
    folder = Path(sys.executable).parent
    python3 = folder / "python3"
    if not python3.exists() or not os.path.samefile(python3, sys.executable):
        raise CliError(
            f"{python3} is not the running Python ({sys.executable}), but Triton's Python stub "
            "would use it. Run tandem from a virtual environment."
        )
    return folder


def _candidates() -> list[Path]:
    """Where distributions, pyenv, conda and standalone builds keep it."""
    libdir = Path(sysconfig.get_config_var("LIBDIR") or "/usr/lib")
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    return list(dict.fromkeys((libdir, libdir / multiarch, Path(sys.base_prefix) / "lib")))
