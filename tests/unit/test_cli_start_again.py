"""A stub of Triton that crashes at its start is a fault of Triton: the server is started again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tandem_cli.errors import CliError
from tandem_cli.server import TandemServer

FAKE_TRITON = f"""#!{sys.executable}
import http.server, pathlib, sys
starts = pathlib.Path(__file__).with_name("starts")
starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
if len(starts.read_text()) <= NUM_CRASHES:
    print("E1130 10:00:00.000000 1 backend_model.cc:692] what(): PROBLEM", flush=True)
    sys.exit(1)
port = int(next(a for a in sys.argv if a.startswith("--http-port=")).split("=")[1])
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", port), Ready).serve_forever()
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def make(problem: str, num_crashes: int) -> TandemServer:
        program = tmp_path / "bin" / "tritonserver"
        program.parent.mkdir()
        backend = tmp_path / "backends" / "python"
        backend.mkdir(parents=True)
        (backend / "triton_python_backend_stub").touch()
        text = FAKE_TRITON.replace("PROBLEM", problem).replace("NUM_CRASHES", str(num_crashes))
        program.write_text(text)
        program.chmod(0o755)
        monkeypatch.setenv("TANDEM_TRITON", str(tmp_path))
        model = tmp_path / "model"
        model.mkdir()
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            (model / name).write_text("{}")
        return TandemServer(model=str(model), http_port=0, grpc_port=0, metrics_port=0)

    return make


def test_it_is_started_once_more(server, tmp_path: Path) -> None:
    with server("boost::interprocess::lock_exception", 1):
        assert (tmp_path / "bin" / "starts").read_text() == "xx"


def test_but_not_for_ever(server, tmp_path: Path) -> None:
    with pytest.raises(CliError, match="lock_exception"):
        server("boost::interprocess::lock_exception", 9).__enter__()
    assert (tmp_path / "bin" / "starts").read_text() == "xx"


def test_nor_for_another_problem(server, tmp_path: Path) -> None:
    with pytest.raises(CliError, match="no such model"):
        server("no such model", 1).__enter__()
    assert (tmp_path / "bin" / "starts").read_text() == "x"
