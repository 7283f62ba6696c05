"""The private folder of one server, and what it leaves in /dev/shm."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from pathlib import Path
from typing import TextIO

SHM = Path("/dev/shm")


class RuntimeDir:
    """``/tmp/tandem-<uid>-<random>``, mode 0700; its short path leaves room for unix sockets.

    A locked file inside shows that the owner lives. Its name is also the prefix of the
    server's files in /dev/shm, so that whoever removes the folder can remove those.
    """

    def __init__(self, parent: Path = Path("/tmp"), shm: Path = SHM) -> None:
        self.path = parent / f"tandem-{os.getuid()}-{secrets.token_hex(4)}"
        self._shm = shm
        self.path.mkdir(mode=0o700)
        self._lock = _take_lock(self.path)

    @property
    def shm_prefix(self) -> str:
        return f"{self.path.name}-"

    def remove(self) -> None:
        """Deletes the folder and the files in /dev/shm; may be called again."""
        _remove(self.path, self._shm)
        self._lock.close()


def remove_stale(parent: Path = Path("/tmp"), shm: Path = SHM) -> list[Path]:
    """Deletes what killed owners of this user left behind; returns the folders."""
    stale = [path for path in parent.glob(f"tandem-{os.getuid()}-*") if _is_stale(path)]
    for path in stale:
        _remove(path, shm)
    return stale


def _take_lock(folder: Path) -> TextIO:
    descriptor = os.open(folder / "lock.draft", os.O_WRONLY | os.O_CREAT, 0o600)
    draft = os.fdopen(descriptor, "w")
    fcntl.flock(draft, fcntl.LOCK_EX)
    (folder / "lock.draft").rename(folder / "lock")  # never seen without its lock
    return draft


def _is_stale(path: Path) -> bool:
    if not re.fullmatch(r"tandem-\d+-[0-9a-f]{8}", path.name) or path.is_symlink():
        return False
    try:
        with (path / "lock").open() as file:
            if os.fstat(file.fileno()).st_uid != os.getuid():
                return False
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except OSError:  # no lock file, or its owner lives
        return False


def _remove(path: Path, shm: Path) -> None:
    for file in shm.glob(f"{path.name}-*"):
        file.unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)
