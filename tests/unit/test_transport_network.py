from pathlib import Path

from tandem.transport.network import interface_of


def test_the_interface_that_has_the_address(tmp_path: Path) -> None:
    assert interface_of("127.0.0.1", {}, tmp_path / "none") == "lo"
    assert interface_of("192.0.2.1", {}, tmp_path / "none") == ""


def test_the_user_or_an_rdma_device_decides(tmp_path: Path) -> None:
    assert interface_of("127.0.0.1", {"UCX_NET_DEVICES": "eth1"}, tmp_path) == ""
    assert interface_of("127.0.0.1", {}, tmp_path) == "lo"
    (tmp_path / "mlx5_0").mkdir()
    assert interface_of("127.0.0.1", {}, tmp_path) == ""
