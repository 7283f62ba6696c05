"""Prompts as perf_analyzer reads them: ``python -m tandem_perf.perf_analyzer_input FILE``."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer


def input_data(prompts: Iterable[str], max_tokens: int) -> dict[str, Any]:
    """One request a prompt. ``return_output_ids`` makes each token a response of its own, also
    where it adds no text; ``ignore_eos`` makes all answers equally long.
    """
    requests = [
        {
            "text_input": [prompt],
            "stream": [True],
            "max_tokens": [max_tokens],
            "ignore_eos": [True],
            "return_output_ids": [True],
        }
        for prompt in prompts
    ]
    return {"data": requests}


def main(
    prompts: Annotated[Path, typer.Argument(help="A text file, one prompt a line.")],
    max_tokens: Annotated[int, typer.Option(min=1)] = 32,
) -> None:
    lines = [line for line in prompts.read_text().splitlines() if line.strip()]
    if not lines:
        sys.exit(f"{prompts}: no prompts in it")
    print(msgspec.json.encode(input_data(lines, max_tokens)).decode())


if __name__ == "__main__":
    typer.run(main)
