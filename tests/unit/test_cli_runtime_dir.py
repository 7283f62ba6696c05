from __future__ import annotations

import os
from pathlib import Path

import pytest

from tandem_cli.runtime_dir import RuntimeDir, remove_stale


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    (tmp_path / "shm").mkdir()
    return tmp_path / "shm"


def test_folder_is_private_and_short(tmp_path: Path, shm: Path) -> None:
    folder = RuntimeDir(tmp_path, shm)
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert folder.path.name.startswith(f"tandem-{os.getuid()}-")
    assert RuntimeDir(tmp_path, shm).path != folder.path


def test_removal_takes_its_shared_memory_only(tmp_path: Path, shm: Path) -> None:
    folder = RuntimeDir(tmp_path, shm)
    (folder.path / "socket").touch()
    (shm / f"{folder.shm_prefix}abc").touch()
    (shm / "others").touch()
    folder.remove()
    folder.remove()
    assert not folder.path.exists()
    assert [path.name for path in shm.iterdir()] == ["others"]


def test_folder_of_a_dead_owner_is_removed_and_of_a_living_one_kept(
    tmp_path: Path, shm: Path
) -> None:
    living = RuntimeDir(tmp_path, shm)
    dead = tmp_path / f"tandem-{os.getuid()}-0123abcd"
    dead.mkdir()
    (dead / "lock").touch()  # nobody holds it
    (shm / f"{dead.name}-region").touch()
    foreign = tmp_path / f"tandem-{os.getuid()}-12345"  # another program's way to name it
    foreign.mkdir()
    (foreign / "lock").touch()
    unlocked = tmp_path / f"tandem-{os.getuid()}-00000000"  # about to be locked
    unlocked.mkdir()

    assert remove_stale(tmp_path, shm) == [dead]
    assert not dead.exists()
    assert list(shm.iterdir()) == []
    assert living.path.exists() and foreign.exists() and unlocked.exists()
