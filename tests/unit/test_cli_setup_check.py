from __future__ import annotations

import importlib.util

import pytest

from tandem_cli.errors import CliError
from tandem_cli.setup_check import check_python


def test_missing_venv_module_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CliError, match=r"no module venv; .*apt install python3\.\d+-venv"):
        check_python()
