"""A perf_analyzer that runs: ``python -m tandem_perf.perf_analyzer_install`` prints its path.

The wheel of tritonclient 2.51 still bundles one. It misses two libraries (libb64, libcudart),
which Triton's wheel brings under other names.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from tandem_cli.cache import cache_folder, locked, whole_folder
from tandem_cli.errors import CliError
from tandem_cli.progress import say
from tandem_cli.triton import fetch_triton
from tandem_cli.wheel import Wheel, fetch_wheel, unpack

WHEEL = Wheel(
    requirement="tritonclient==2.51.0",
    filename="tritonclient-2.51.0-py3-none-manylinux1_x86_64.whl",
    sha256="c485bb0123bdf310f90bc8b03d3489b28df2ffed55b30c7eee0b795b48113d52",
)
NAME = "perf_analyzer"
LIBRARIES = {"libb64.so.0d": "libb64*.so.0d", "libcudart.so.12": "libcudart*.so.12*"}
_MEMBER = f"tritonclient-2.51.0.data/data/bin/{NAME}"


def install_perf_analyzer(environ: Mapping[str, str] = os.environ) -> Path:
    """Downloads and unpacks it unless it is there; returns a program that needs no settings."""
    cache = cache_folder(environ)
    final = cache / "perf_analyzer-2.51"
    with locked(cache, NAME):
        if not final.is_dir():
            libraries = find_libraries(fetch_triton(environ) / "lib")
            say(f"fetching {WHEEL.requirement} (14 MB: {NAME})")
            wheel = fetch_wheel(WHEEL, cache / "wheels")
            with whole_folder(final) as draft:
                binary = draft / f"{NAME}.bin"
                unpack(wheel, {_MEMBER: binary}, frozenset({binary}))
                for name, target in libraries.items():
                    (draft / name).symlink_to(target)
                _write_launcher(draft / NAME)
    return final / NAME


def find_libraries(folder: Path) -> dict[str, Path]:
    """``{name that perf_analyzer asks for: file}`` in Triton's folder of libraries."""
    found = {}
    for name, pattern in LIBRARIES.items():
        matches = sorted(folder.glob(pattern))
        if not matches:
            raise CliError(f"{folder} has no {pattern}, which {NAME} needs")
        found[name] = matches[0]
    return found


def _write_launcher(path: Path) -> None:
    path.write_text(
        "#!/bin/sh\n"
        'here=$(dirname "$(readlink -f "$0")")\n'
        'export LD_LIBRARY_PATH="$here${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"\n'
        f'exec "$here/{NAME}.bin" "$@"\n'
    )
    path.chmod(0o755)


def main() -> None:
    try:
        print(install_perf_analyzer())
    except CliError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
