"""The commands ``generate`` and ``chat``, as plain functions for a typer program.

Exit codes: 0, or 2 for an invalid request, 3 for a server that is unavailable or cannot be
reached, 1 for any other failure. Answers go to stdout; summaries and errors to stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import msgspec
import typer

from tandem_client.chat_session import ChatSession
from tandem_client.client import DEFAULT_MODEL, DEFAULT_TIMEOUT_S, DEFAULT_URL, TandemClient
from tandem_client.errors import (
    ConnectionFailed,
    InvalidRequest,
    TandemClientError,
    Unavailable,
)
from tandem_client.request import GenerateParams
from tandem_client.summary import summary_line

Url = Annotated[str, typer.Option("--url", help="http://, https:// or grpc:// and host:port.")]
Model = Annotated[str, typer.Option("--model", help="Name of the model in Triton.")]
Timeout = Annotated[float, typer.Option("--timeout", help="Seconds for a whole answer.")]
NoStream = Annotated[bool, typer.Option("--no-stream", help="Show the answer once complete.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print completions as JSON.")]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens")]
Temperature = Annotated[float | None, typer.Option("--temperature", help="0 is greedy.")]
TopP = Annotated[float | None, typer.Option("--top-p")]
TopK = Annotated[int | None, typer.Option("--top-k")]
Seed = Annotated[int | None, typer.Option("--seed")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="Stop text; may be repeated.")]


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt, or - to read it from stdin.")],
    url: Url = DEFAULT_URL,
    model: Model = DEFAULT_MODEL,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    stop: Stop = None,
    no_stream: NoStream = False,
    as_json: AsJson = False,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """Complete one prompt; the text appears as its tokens come."""
    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    params = _params(max_tokens, temperature, top_p, top_k, seed, stop)
    with _exit_code_of_errors(), TandemClient(url, model=model, timeout=timeout) as client:
        if as_json or no_stream:
            completion = client.generate(text, **params)
            _write(msgspec.json.encode(completion).decode() if as_json else completion.text)
        else:
            with client.stream(text, **params) as stream:
                for chunk in stream:
                    _write(chunk.text)
                completion = stream.result()
        _write("\n")
        if not as_json:
            typer.echo(summary_line(completion), err=True)


def chat(
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    url: Url = DEFAULT_URL,
    model: Model = DEFAULT_MODEL,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    stop: Stop = None,
    no_stream: NoStream = False,
    as_json: AsJson = False,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """Talk with the model. Ctrl-C stops an answer; /reset forgets; /exit or Ctrl-D leaves."""
    params = _params(max_tokens, temperature, top_p, top_k, seed, stop)
    exit_code = 0
    with _exit_code_of_errors(), TandemClient(url, model=model, timeout=timeout) as client:
        session = ChatSession(client, system, params)
        while (question := _read_question()) is not None:
            if question == "/reset":
                session.reset()
            elif question:
                exit_code = _answer(session, question, not (no_stream or as_json), as_json)
    raise typer.Exit(exit_code)


def _answer(session: ChatSession, question: str, streamed: bool, as_json: bool) -> int:
    """Shows one answer; returns the exit code it would stand for at the end of the chat."""
    pieces = session.ask(question, streamed)
    try:
        for text in pieces:
            if not as_json:
                _write(text)
        if as_json:
            _write(msgspec.json.encode(session.last_completion).decode())
    except KeyboardInterrupt:
        pieces.close()
        typer.echo("\n(cancelled)", err=True)
        return 0
    except TandemClientError as error:
        typer.echo(f"error: {error}", err=True)
        return _exit_code(error)
    _write("\n")
    if session.last_completion and not as_json:
        typer.echo(summary_line(session.last_completion), err=True)
    return 0


def _read_question() -> str | None:
    """None once the user leaves."""
    try:
        typer.echo("> ", nl=False, err=True)
        question = input().strip()
    except (EOFError, KeyboardInterrupt):
        typer.echo(err=True)
        return None
    return None if question == "/exit" else question


def _params(
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    seed: int | None,
    stop: list[str] | None,
) -> GenerateParams:
    return {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "stop": stop,
    }


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@contextmanager
def _exit_code_of_errors() -> Iterator[None]:
    try:
        yield
    except TandemClientError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(_exit_code(error)) from error


def _exit_code(error: TandemClientError) -> int:
    if isinstance(error, InvalidRequest):
        return 2
    return 3 if isinstance(error, Unavailable | ConnectionFailed) else 1
