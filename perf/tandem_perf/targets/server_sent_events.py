"""The data of server-sent events, from a body that arrives in pieces of any size."""

from __future__ import annotations


class EventSplitter:
    def __init__(self) -> None:
        self._pending = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of all events that are complete now. One line is one event."""
        *lines, self._pending = (self._pending + piece).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
