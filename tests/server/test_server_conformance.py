"""The conformance suite, against our own server, which has to support all of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tandem_cli.server import TandemServer

sys.path.append(str(Path(__file__).parents[1] / "conformance"))

from endpoint import Endpoint  # noqa: E402
from test_conformance import *  # noqa: E402, F403


@pytest.fixture(scope="session")
def endpoint(tiny_server: TandemServer) -> Endpoint:
    return Endpoint(tiny_server.http_url, tiny_server.grpc_address, "llm", needs_all=True)
