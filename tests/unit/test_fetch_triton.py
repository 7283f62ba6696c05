from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tandem_cli.errors import CliError
from tandem_cli.libpython import libpython_folder, python_version
from tandem_cli.triton import (
    TritonInstallation,
    check_platform,
    fetch_triton,
    triton_installation,
    wheel_layout,
)


@pytest.mark.parametrize(
    ("system", "machine", "libc", "problem"),
    [
        ("darwin", "arm64", ("", ""), "Linux on x86_64"),
        ("linux", "aarch64", ("glibc", "2.39"), "Linux on x86_64"),
        ("linux", "x86_64", ("glibc", "2.31"), "glibc 2.35"),
        ("linux", "x86_64", ("", ""), "no glibc"),
    ],
)
def test_other_platforms_are_told_what_to_do(
    system: str, machine: str, libc: tuple[str, str], problem: str
) -> None:
    with pytest.raises(CliError, match=problem) as error:
        check_platform(system, machine, libc)
    assert "TANDEM_TRITON" in str(error.value)


def test_supported_platform_passes() -> None:
    check_platform("linux", "x86_64", ("glibc", "2.35"))


def test_layout_has_one_backend_directory_per_python_version() -> None:
    names = ["nvidia_pytriton.libs/", "nvidia_pytriton.libs/libx.so", "pytriton/a.py",
             "nvidia_pytriton-0.7.0.dist-info/licenses/LICENSE"]
    targets = {str(path) for path in wheel_layout(names, Path("/t")).values()}
    assert targets == {
        "/t/LICENSE",
        "/t/bin/tritonserver",
        "/t/lib/libx.so",
        "/t/backends-3.11/python/triton_python_backend_stub",
        "/t/backends-3.12/python/triton_python_backend_stub",
    }


def test_environment_puts_our_folders_first() -> None:
    triton = TritonInstallation(
        server=Path("/t/bin/tritonserver"),
        backend_directory=Path("/t/backends"),
        library_folders=(Path("/py/lib"), Path("/t/lib")),
        environment_bin=Path("/venv/bin"),
    )
    env = triton.env({"PATH": "/usr/bin", "LD_LIBRARY_PATH": "/cuda", "OTHER": "x"})
    assert env == {
        "PATH": "/venv/bin:/usr/bin",
        "LD_LIBRARY_PATH": "/py/lib:/t/lib:/cuda",
        "OTHER": "x",
    }
    assert triton.env({})["LD_LIBRARY_PATH"] == "/py/lib:/t/lib"


def test_missing_libpython_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(CliError, match=f"apt install libpython{python_version()}"):
        libpython_folder([tmp_path])


def test_libpython_is_found_in_any_candidate(tmp_path: Path) -> None:
    (tmp_path / f"libpython{python_version()}.so.1.0").touch()
    assert libpython_folder([tmp_path / "none", tmp_path]) == tmp_path


def test_old_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", _Version((3, 10, 1)))
    with pytest.raises(CliError, match=r"Python 3\.10 is not supported; use one of 3\.11"):
        python_version()


class _Version(tuple[int, ...]):
    major, minor = 3, 10


def test_triton_that_was_not_fetched_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="tandem fetch triton"):
        triton_installation({"TANDEM_CACHE": str(tmp_path)})


def _installed(root: Path, stub: bytes) -> Path:
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "tritonserver").touch()
    (root / "backends" / "python").mkdir(parents=True)
    (root / "backends" / "python" / "triton_python_backend_stub").write_bytes(stub)
    return root


def test_installed_triton_is_used_as_it_is(tmp_path: Path) -> None:
    stub = f"..libpython{python_version()}.so.1.0..".encode()
    environ = {"TANDEM_TRITON": str(_installed(tmp_path, stub))}
    triton = triton_installation(environ)
    assert triton.server == tmp_path / "bin" / "tritonserver"
    assert triton.backend_directory == tmp_path / "backends"
    assert fetch_triton(environ) == tmp_path


def test_installed_triton_for_another_python_is_refused(tmp_path: Path) -> None:
    environ = {"TANDEM_TRITON": str(_installed(tmp_path, b"..libpython3.8.so.1.0.."))}
    with pytest.raises(CliError, match=r"stub is for Python 3\.8"):
        triton_installation(environ)


def test_folder_without_triton_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="tritonserver is missing"):
        triton_installation({"TANDEM_TRITON": str(tmp_path)})
