"""A conversation: its history, and how one turn adds to it."""

from __future__ import annotations

from collections.abc import Generator, Iterator

from tandem_client.assembly import Completion
from tandem_client.client import TandemClient
from tandem_client.errors import TandemClientError
from tandem_client.request import GenerateParams


class ChatSession:
    """Keeps the history. A failed turn leaves it as it was; a cancelled one keeps the part shown.

    ``last_completion`` belongs to the latest turn; None unless that one finished.
    """

    def __init__(self, client: TandemClient, system: str | None, params: GenerateParams) -> None:
        self._client = client
        self._system = system
        self._params = params
        self._turns: list[dict[str, str]] = []
        self.last_completion: Completion | None = None

    @property
    def messages(self) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self._system}] if self._system else []
        return system + self._turns

    def reset(self) -> None:
        self._turns.clear()
        self.last_completion = None

    def ask(self, question: str, streamed: bool = True) -> Generator[str, None, None]:
        """The pieces of the answer as they come; closing the iterator cancels the request."""
        self.last_completion = None
        self._turns.append({"role": "user", "content": question})
        params: GenerateParams = {**self._params, "messages": self.messages}
        shown = ""
        try:
            for text in self._pieces(params, streamed):
                shown += text
                yield text
        except TandemClientError:
            shown = ""
            raise
        finally:
            if shown:
                self._turns.append({"role": "assistant", "content": shown})
            else:
                self._turns.pop()

    def _pieces(self, params: GenerateParams, streamed: bool) -> Iterator[str]:
        if not streamed:
            self.last_completion = self._client.generate(**params)
            yield self.last_completion.text
            return
        with self._client.stream(**params) as stream:
            for chunk in stream:
                self.last_completion = chunk.completion
                yield chunk.text
