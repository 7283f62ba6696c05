"""How a server is drained: files in its runtime directory, which also outlive a deaf process.

``drain`` holds the seconds of grace for what runs; whoever wants the server to stop writes it. Each
orchestrator answers with ``drained-<name>`` when it has no request any more.
"""

from __future__ import annotations

import os
from pathlib import Path

_REQUEST = "drain"
_ANSWER = "drained-"
_SOCKET = "stream-"  # one for each orchestrator


def request_drain(runtime_dir: Path, grace_s: float) -> None:
    """The first request stands."""
    draft = runtime_dir / f"drain.{os.getpid()}"
    draft.write_text(f"{grace_s}\n")
    try:
        os.link(draft, runtime_dir / _REQUEST)
    except FileExistsError:
        pass
    finally:
        draft.unlink()


def requested_grace_s(runtime_dir: Path) -> float | None:
    """None as long as nobody wants the server to be drained."""
    try:
        return float((runtime_dir / _REQUEST).read_text())
    except FileNotFoundError:
        return None


def say_drained(runtime_dir: Path, orchestrator: str) -> None:
    (runtime_dir / f"{_ANSWER}{orchestrator}").touch()


def is_drained(runtime_dir: Path) -> bool:
    """Whether no orchestrator of this server has a request any more."""
    names = {path.name.removeprefix(_SOCKET) for path in runtime_dir.glob(f"{_SOCKET}*")}
    return all((runtime_dir / f"{_ANSWER}{name}").exists() for name in names)


def forget_drain(runtime_dir: Path, orchestrator: str) -> None:
    """What is left of a drain when an orchestrator ends."""
    (runtime_dir / f"{_ANSWER}{orchestrator}").unlink(missing_ok=True)
    if not any(runtime_dir.glob(f"{_ANSWER}*")):
        (runtime_dir / _REQUEST).unlink(missing_ok=True)
