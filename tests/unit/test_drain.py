from pathlib import Path

from tandem.drain import forget_drain, is_drained, request_drain, requested_grace_s, say_drained


def test_all_orchestrators_must_have_ended_their_requests(tmp_path: Path) -> None:
    for name in ("llm_0_0", "llm_0_1"):
        (tmp_path / f"stream-{name}").touch()
    assert requested_grace_s(tmp_path) is None
    request_drain(tmp_path, 2.5)
    request_drain(tmp_path, 100)
    assert requested_grace_s(tmp_path) == 2.5, "the first request stands"
    say_drained(tmp_path, "llm_0_0")
    assert not is_drained(tmp_path)
    say_drained(tmp_path, "llm_0_1")
    assert is_drained(tmp_path)


def test_nothing_is_left(tmp_path: Path) -> None:
    request_drain(tmp_path, 1)
    say_drained(tmp_path, "a")
    say_drained(tmp_path, "b")
    forget_drain(tmp_path, "a")
    assert requested_grace_s(tmp_path) == 1, "b still needs it"
    forget_drain(tmp_path, "b")
    assert list(tmp_path.iterdir()) == []


def test_a_server_without_orchestrators_is_drained(tmp_path: Path) -> None:
    assert is_drained(tmp_path)
