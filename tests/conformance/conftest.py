"""Options of the conformance suite; without --url the suite is not collected."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "server"))  # for triton_calls

from endpoint import Endpoint  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance")
    group.addoption("--url", help="http://host:port of a Triton server")
    group.addoption("--grpc-url", default="", help="host:port; without it gRPC is not checked")
    group.addoption("--llm", default="llm", help="name of the model")


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    return None if config.getoption("--url", None) else True


@pytest.fixture(scope="session")
def endpoint(pytestconfig: pytest.Config) -> Endpoint:
    option = pytestconfig.getoption
    return Endpoint(option("--url"), option("--grpc-url"), option("--llm"))
