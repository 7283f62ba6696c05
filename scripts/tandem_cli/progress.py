"""Progress on stderr: stdout belongs to results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn


@dataclass(frozen=True)
class BytesProgress:
    progress: Progress
    task: TaskID

    def advance(self, num_bytes: int) -> None:
        self.progress.advance(self.task, num_bytes)


@contextmanager
def bytes_progress(what: str, total_bytes: int) -> Iterator[BytesProgress]:
    """A bar that vanishes when done; on something else than a terminal it shows nothing."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as p:
        yield BytesProgress(p, p.add_task(what, total=total_bytes))


def say(text: str) -> None:
    """One line for the user on stderr."""
    Console(stderr=True, highlight=False).print(text, markup=False, soft_wrap=True)
