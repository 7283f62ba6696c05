"""``tandem run``: fetch everything, serve, and show one answer."""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from tandem_cli.serve import DEFAULTS, log_printer, run_foreground
from tandem_cli.server import TandemServer

QUESTION = "What is the capital of France?"
# Long enough to see the hand-over; the first prompt goes to the prefill pool (policy auto).
CONTEXT = (
    "France is a country in Western Europe. It borders Belgium, Luxembourg, Germany, Switzerland, "
    "Italy, Monaco, Spain and Andorra. About 68 million people live there. Its largest cities are "
    "Paris, Marseille, Lyon, Toulouse and Nice. Paris is the capital of France and the seat of its "
    "government; it lies on the Seine in the north of the country. The longest river of France is "
    "the Loire, its highest mountain is Mont Blanc, on the border with Italy. The country is known "
    "for its food, its wine, its museums and its cathedrals, and it is visited by more tourists "
    "than any other. The currency is the euro, the language is French.\n\n"
)


def run(
    log_level: str = typer.Option("warning", help="debug, info, warning or error."),
) -> None:
    """Fetch Triton and a small model, serve it and ask it one question; Ctrl-C stops."""
    console = Console(stderr=True, highlight=False)
    server = TandemServer(log=log_printer(console), model=DEFAULTS.model, log_level=log_level)

    def on_ready() -> None:
        print(server.ready_line(), flush=True)
        ask(server.http_url, QUESTION)
        print(f"\nNow ask your own (Ctrl-C here stops the server):\n{curl(server.http_url)}\n"
              f"  tandem chat --url {server.http_url}", flush=True)

    raise typer.Exit(run_foreground(server, console, on_ready))


def ask(url: str, question: str) -> None:
    """Streams the answer to stdout, then its timings and the path it took."""
    messages = [{"role": "user", "content": CONTEXT + question}]
    from tandem_client import TandemClient
    from tandem_client.summary import summary_line

    print(f"\n> (a paragraph about France) {question}", flush=True)
    with (
        TandemClient(url) as client,
        client.stream(messages=messages, max_tokens=64) as stream,
    ):
        for chunk in stream:
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
        completion = stream.result()
    print(f"\n{summary_line(completion)}", flush=True)


def curl(url: str) -> str:
    """A command that streams one answer with curl alone."""
    return (
        f"  curl -N {url}/v2/models/llm/generate_stream -d "
        "'{\"text_input\": \"Once upon a time\", \"max_tokens\": 32, \"stream\": true}'"
    )
