from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from tandem_cli.cache import cache_folder, locked, whole_folder
from tandem_cli.errors import CliError


def test_cache_folder_is_taken_from_the_environment(tmp_path: Path) -> None:
    folder = cache_folder({"TANDEM_CACHE": str(tmp_path / "a" / "b")})
    assert folder == tmp_path / "a" / "b"
    assert folder.is_dir()


def test_cache_folder_that_cannot_be_made_names_the_variable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CliError, match="TANDEM_CACHE"):
        cache_folder({"TANDEM_CACHE": str(tmp_path / "file" / "cache")})


def test_folder_appears_only_when_it_is_whole(tmp_path: Path) -> None:
    final = tmp_path / "artifact"
    with whole_folder(final) as draft:
        (draft / "part").write_text("x")
        assert not final.exists()
    assert (final / "part").read_text() == "x"
    assert [path.name for path in tmp_path.iterdir()] == ["artifact"]


def test_failure_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), whole_folder(tmp_path / "artifact") as draft:
        (draft / "part").touch()
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_draft_of_a_killed_run_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".artifact.draft-killed").mkdir()
    with whole_folder(tmp_path / "artifact"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["artifact"]


def _append_under_lock(cache: Path, name: str) -> None:
    with locked(cache, "artifact"):
        text = (cache / "log").read_text()
        (cache / "log").write_text(text + name)


def test_lock_keeps_processes_apart(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("")
    context = multiprocessing.get_context("fork")
    with locked(tmp_path, "artifact"):
        others = [
            context.Process(target=_append_under_lock, args=(tmp_path, name)) for name in "ab"
        ]
        for other in others:
            other.start()
        others[0].join(0.05)
        assert (tmp_path / "log").read_text() == ""
    for other in others:
        other.join(10)
    assert sorted((tmp_path / "log").read_text()) == ["a", "b"]
