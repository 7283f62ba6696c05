"""Triton itself: from the PyPI wheel that carries the real server, or installed in a container."""

from __future__ import annotations

import os
import platform
import re
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tandem_cli.cache import cache_folder, locked, whole_folder
from tandem_cli.errors import CliError
from tandem_cli.libpython import SUPPORTED, environment_bin, libpython_folder, python_version
from tandem_cli.progress import say
from tandem_cli.wheel import Wheel, fetch_wheel, unpack

WHEEL = Wheel(
    requirement="nvidia-pytriton==0.7.0",  # tritonserver 2.51 = release 24.10
    filename="nvidia_pytriton-0.7.0-py3-none-manylinux_2_35_x86_64.whl",
    sha256="21f063ff93bb426d0c06b7a55e7eb9efcfe62c0dddd9a908e9877e18710128df",
)
FOLDER = "triton-2.51"
MIN_GLIBC = (2, 35)
STUB = "triton_python_backend_stub"


@dataclass(frozen=True, kw_only=True)
class TritonInstallation:
    """A Triton that can start now, with the stub of the running Python."""

    server: Path
    backend_directory: Path
    library_folders: tuple[Path, ...]
    environment_bin: Path

    def env(self, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        """``environ`` with the search paths that tritonserver and its stubs need."""
        libraries = [str(folder) for folder in self.library_folders]
        libraries += filter(None, [environ.get("LD_LIBRARY_PATH")])
        paths = [str(self.environment_bin), *filter(None, [environ.get("PATH")])]
        search = {"LD_LIBRARY_PATH": ":".join(libraries), "PATH": ":".join(paths)}
        return {**environ, **search}


def triton_installation(environ: Mapping[str, str] = os.environ) -> TritonInstallation:
    """The Triton of ``$TANDEM_TRITON`` or of the cache folder (an error when not fetched yet)."""
    if root := environ.get("TANDEM_TRITON"):
        return _installed(Path(root))
    version, libpython = python_version(), libpython_folder()
    root_folder = cache_folder(environ) / FOLDER
    if not root_folder.is_dir():
        raise CliError("Triton is not there yet; run `tandem fetch triton`")
    return TritonInstallation(
        server=root_folder / "bin" / "tritonserver",
        backend_directory=root_folder / f"backends-{version}",
        library_folders=(libpython, root_folder / "lib"),
        environment_bin=environment_bin(),
    )


def fetch_triton(environ: Mapping[str, str] = os.environ) -> Path:
    """Downloads and unpacks Triton unless it is there; returns its folder."""
    if root := environ.get("TANDEM_TRITON"):
        _installed(Path(root))
        return Path(root)
    check_platform(sys.platform, platform.machine(), platform.libc_ver())
    libpython_folder()
    cache = cache_folder(environ)
    final = cache / FOLDER
    with locked(cache, "triton"):
        if not final.is_dir():
            say(f"fetching {WHEEL.requirement} (55 MB: Triton server 2.51)")
            wheel = fetch_wheel(WHEEL, cache / "wheels")
            with whole_folder(final) as draft:
                _unpack_server(wheel, draft)
    return final


def check_platform(system: str, machine: str, libc: tuple[str, str]) -> None:
    """Raises unless the server of the wheel runs on such a machine."""
    instead = ("Use NVIDIA's Triton container instead and set TANDEM_TRITON to its "
               "/opt/tritonserver.")
    if system != "linux" or machine != "x86_64":
        raise CliError(f"the Triton wheel is for Linux on x86_64, this is {system} on {machine}. "
                       f"{instead}")
    name, version = libc
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if name != "glibc" or numbers < MIN_GLIBC:
        raise CliError(f"the Triton wheel needs glibc 2.35 or newer, this is {name or 'no glibc'} "
                       f"{version}. {instead}")


def wheel_layout(names: list[str], root: Path) -> dict[str, Path]:
    """``{name in the wheel: target}``: one backend directory per supported Python version."""
    server = "pytriton/tritonserver"
    layout = {f"{server}/bin/tritonserver": root / "bin" / "tritonserver"}
    for name in names:
        if name.startswith("nvidia_pytriton.libs/") and not name.endswith("/"):
            layout[name] = root / "lib" / Path(name).name
        elif name.endswith("/licenses/LICENSE"):
            layout[name] = root / "LICENSE"
    for major, minor in SUPPORTED:
        stub = f"{server}/python_backend_stubs/{major}.{minor}/{STUB}"
        layout[stub] = root / f"backends-{major}.{minor}" / "python" / STUB
    return layout


def _unpack_server(wheel: Path, root: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        layout = wheel_layout(archive.namelist(), root)
        shared = {
            name: archive.read(name)
            for name in archive.namelist()
            if name.startswith("pytriton/tritonserver/backends/python/") and not name.endswith("/")
        }
    run = {path for path in layout.values() if path.name in ("tritonserver", STUB)}
    unpack(wheel, layout, frozenset(run))
    for folder in root.glob("backends-*/python"):
        for name, content in shared.items():
            (folder / Path(name).name).write_bytes(content)


def _installed(root: Path) -> TritonInstallation:
    """A Triton that somebody else installed, as NVIDIA's container has it."""
    server, backends = root / "bin" / "tritonserver", root / "backends"
    stub = backends / "python" / STUB
    for path in (server, stub):
        if not path.is_file():
            raise CliError(f"TANDEM_TRITON = {str(root)!r}: {path} is missing")
    wanted = re.search(rb"libpython(3\.\d+)\.so", stub.read_bytes())
    if wanted and wanted[1].decode() != python_version():
        raise CliError(
            f"TANDEM_TRITON = {str(root)!r}: its Python stub is for Python {wanted[1].decode()}, "
            f"tandem runs on {python_version()}. Install tandem with that version."
        )
    return TritonInstallation(
        server=server,
        backend_directory=backends,
        library_folders=(libpython_folder(), root / "lib"),
        environment_bin=environment_bin(),
    )
