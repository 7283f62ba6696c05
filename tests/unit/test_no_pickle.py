"""No channel and no file is read in a way that could run code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for folder in ("python_backends", "client", "scripts", "model_repository")
    for path in (ROOT / folder).rglob("*.py")
]
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {"send_pyobj", "recv_pyobj", "eval", "exec"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_unpickles_or_evaluates(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not FORBIDDEN_MODULES & {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in FORBIDDEN_MODULES
        elif isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name):
                assert called.id not in FORBIDDEN_CALLS
            elif isinstance(called, ast.Attribute):
                assert called.attr not in FORBIDDEN_CALLS - {"eval"}  # modules have .eval()
                is_torch = isinstance(called.value, ast.Name) and called.value.id == "torch"
                assert not (is_torch and called.attr == "load")


def test_there_are_sources() -> None:
    assert len(SOURCES) > 80
