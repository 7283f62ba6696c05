"""The cache folder: one lock per artifact, and folders that appear whole or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tandem_cli.errors import CliError


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """``$TANDEM_CACHE`` or ``~/.cache/tandem``; created when missing."""
    folder = Path(environ.get("TANDEM_CACHE") or Path.home() / ".cache" / "tandem")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CliError(f"cannot create the cache folder {folder}: {error.strerror}. "
                       "Set TANDEM_CACHE to a folder that you can write.") from error
    return folder.resolve()


@contextmanager
def locked(cache: Path, name: str) -> Iterator[None]:
    """Holds the lock of one artifact against other processes; waits for its present owner."""
    with (cache / f".{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:  # explicitly: a forked child may hold the file open; death releases it as well
            fcntl.flock(file, fcntl.LOCK_UN)


@contextmanager
def whole_folder(final: Path) -> Iterator[Path]:
    """A draft folder that becomes ``final`` when the block ends well; call it under the lock.

    Drafts that an interrupted run left behind are removed first.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    for stale in final.parent.glob(f".{final.name}.draft-*"):
        shutil.rmtree(stale)
    draft = Path(tempfile.mkdtemp(dir=final.parent, prefix=f".{final.name}.draft-"))
    try:
        yield draft
        draft.chmod(0o755)
        draft.rename(final)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
