from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from tandem_cli.errors import CliError
from tandem_cli.main import COMMANDS, app
from tandem_cli.options import ServerOptions
from tandem_cli.run import curl
from tandem_cli.server import TandemServer

runner = CliRunner()


def test_help_lists_every_command() -> None:
    output = runner.invoke(app, ["--help"]).output
    assert [name for name in COMMANDS if name not in output] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    result = runner.invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert f"tandem {command}" in result.output or f"{command} [OPTIONS]" in result.output


def test_unknown_command_is_named() -> None:
    result = runner.invoke(app, ["nope"])
    assert result.exit_code == 2
    assert "nope" in result.output


def test_fault_of_the_user_is_one_message_with_status_1() -> None:
    result = runner.invoke(app, ["serve", "--set", "blok_size=1"])
    assert result.exit_code == 1
    assert result.output.startswith("error: --set blok_size=1: unknown key 'blok_size'")


def test_bad_log_level_is_named() -> None:
    with pytest.raises(CliError, match="--log-level loud: one of debug, info"):
        ServerOptions(log_level="loud")


def test_unknown_server_option_is_a_mistake() -> None:
    with pytest.raises(TypeError, match="modle"):
        TandemServer(modle="x")


def test_server_that_was_not_started_can_be_stopped() -> None:
    TandemServer().stop()


def test_client_commands_need_neither_torch_nor_the_server() -> None:
    program = (
        "import sys; from typer.testing import CliRunner; from tandem_cli.main import app;"
        "result = CliRunner().invoke(app, ['generate', '--help']);"
        "heavy = {'torch', 'transformers', 'tandem', 'tandem_cli.server'} & set(sys.modules);"
        "print(result.exit_code, sorted(heavy))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout == "0 []\n", result.stderr


def test_curl_command_carries_valid_json() -> None:
    body = curl("http://h:1").partition("-d '")[2].rstrip("'")
    assert json.loads(body)["stream"] is True
    assert "http://h:1/v2/models/llm/generate_stream" in curl("http://h:1")
