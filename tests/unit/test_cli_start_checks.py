from __future__ import annotations

import random
import socket
from collections import namedtuple
from pathlib import Path

import pytest

from tandem_cli.errors import CliError
from tandem_cli.ports import PICK_FROM, Ports, choose_ports
from tandem_cli.preflight import MIB, check_model, check_shared_memory

LOCAL = "127.0.0.1"


def test_zero_picks_different_free_ports() -> None:
    ports = choose_ports(LOCAL, Ports(http=0, grpc=0, metrics=0), random.Random(1))
    assert len({ports.http, ports.grpc, ports.metrics}) == 3
    assert {ports.http, ports.grpc, ports.metrics} <= set(PICK_FROM)


def test_port_in_use_names_the_option() -> None:
    with socket.socket() as other:
        other.bind((LOCAL, 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(CliError, match=f"--grpc-port {port}: cannot listen .* in use"):
            choose_ports(LOCAL, Ports(http=0, grpc=port, metrics=0), random.Random(2))


def test_one_port_for_two_services_is_refused() -> None:
    free = choose_ports(LOCAL, Ports(http=0, grpc=0, metrics=0), random.Random(3)).http
    with pytest.raises(CliError, match=f"--metrics-port {free}"):
        choose_ports(LOCAL, Ports(http=free, grpc=0, metrics=free), random.Random(4))


def test_address_of_another_machine_is_refused() -> None:
    with pytest.raises(CliError, match=r"cannot listen on 192\.0\.2\.1"):
        choose_ports("192.0.2.1", Ports(http=0, grpc=0, metrics=0), random.Random(5))


def test_model_folder_must_be_complete(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="no such directory"):
        check_model(tmp_path / "none")
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        with pytest.raises(CliError, match=r"no (config\.json|tokenizer\.json|\*\.safetensors)"):
            check_model(tmp_path)
        (tmp_path / name).touch()
    check_model(tmp_path)


def test_small_shared_memory_says_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stats = namedtuple("stats", "f_bavail f_frsize f_blocks")(5, MIB, 64)
    monkeypatch.setattr("os.statvfs", lambda path: stats)
    check_shared_memory(3, tmp_path)
    with pytest.raises(CliError, match="5 MB free, 4 Triton model instances need 6 MB") as error:
        check_shared_memory(4, tmp_path)
    assert "docker run --shm-size=81m" in str(error.value)
