from __future__ import annotations

import hashlib
import os
import zipfile
from pathlib import Path

import pytest

from tandem_cli.errors import CliError
from tandem_cli.wheel import Wheel, fetch_wheel, unpack

GOOD = b"the real wheel"
WHEEL = Wheel(
    requirement="thing==1", filename="thing-1.whl", sha256=hashlib.sha256(GOOD).hexdigest()
)


class Index:
    """Serves the given contents, one a download."""

    def __init__(self, *contents: bytes) -> None:
        self.contents = list(contents)

    def __call__(self, wheel: Wheel, folder: Path) -> None:
        (folder / wheel.filename).write_bytes(self.contents.pop(0))


def test_wheel_is_downloaded_once(tmp_path: Path) -> None:
    index = Index(GOOD)
    assert fetch_wheel(WHEEL, tmp_path / "wheels", index).read_bytes() == GOOD
    assert fetch_wheel(WHEEL, tmp_path / "wheels", index).read_bytes() == GOOD
    assert index.contents == []


def test_damaged_wheel_is_downloaded_again(tmp_path: Path) -> None:
    (tmp_path / WHEEL.filename).write_bytes(GOOD[:5])
    assert fetch_wheel(WHEEL, tmp_path, Index(GOOD)).read_bytes() == GOOD


def test_wheel_that_stays_wrong_is_an_error_and_is_not_kept(tmp_path: Path) -> None:
    index = Index(b"bad", b"bad", GOOD)
    with pytest.raises(CliError, match="wrong checksum") as error:
        fetch_wheel(WHEEL, tmp_path, index)
    assert WHEEL.sha256 in str(error.value)
    assert hashlib.sha256(b"bad").hexdigest() in str(error.value)
    assert index.contents == [GOOD]
    assert list(tmp_path.iterdir()) == []


def test_other_file_than_expected_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CliError, match=r"not as thing-1\.whl"):
        fetch_wheel(WHEEL, tmp_path, lambda wheel, folder: None)


def test_unpack_sets_run_bits(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        archive.writestr("x/program", b"run me")
        archive.writestr("x/data", b"read me")
    program, data = tmp_path / "bin" / "program", tmp_path / "lib" / "data"
    unpack(tmp_path / "a.whl", {"x/program": program, "x/data": data}, frozenset({program}))
    assert program.read_bytes() == b"run me"
    assert data.read_bytes() == b"read me"
    assert os.access(program, os.X_OK)
    assert data.stat().st_mode & 0o111 == 0
