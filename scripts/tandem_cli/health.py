"""``tandem health``: whether requests succeed, proven with real ones.

Triton's own readiness stays true when a process behind it is dead, so it proves nothing. A probe is
a small prompt that no cache has; one takes the hand-over (a prefill, a KV transfer, a decode step),
one is prefilled by the decode engine itself.
"""

from __future__ import annotations

import json
import secrets
from typing import Annotated

import typer

from tandem_cli.errors import CliError
from tandem_cli.http_request import request


def health(
    url: Annotated[str, typer.Option(help="http:// and host:port.")] = "http://127.0.0.1:8000",
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for each probe.")] = 30.0,
) -> None:
    """Prove with small requests that the server works; the exit status is 1 if it does not."""
    for path in probed_paths(url, timeout):
        print(f"{path}: {probe(url, path, timeout)}")


def probed_paths(url: str, timeout_s: float) -> list[str]:
    """Without a prefill pool there is only one."""
    is_there = request(url, "GET", "/v2/models/prefill", None, timeout_s)[0] == 200
    return ["local", "remote"] if is_there else ["local"]


def probe(url: str, path: str, timeout_s: float) -> str:
    """Who served a prompt on this path; raises ``CliError`` if nobody did."""
    body = {
        "text_input": secrets.token_hex(24),
        "max_tokens": 2,
        "ignore_eos": True,
        "tandem_path": path,
    }
    status, answer = request(url, "POST", "/v2/models/llm/generate", body, timeout_s)
    if status != 200:
        raise CliError(f"{path}: {answer.get('error', f'HTTP {status}')}")
    timings = json.loads(answer["timings"])
    if answer["num_output_tokens"] != 2 or timings["path"] != path:
        raise CliError(f"{path}: a wrong answer: {answer}")
    moved = f", {timings['kv_bytes']} bytes of KV moved" if path == "remote" else ""
    prefill, decode = timings["prefill_worker"], timings["decode_worker"]
    return f"ok, prefill at {prefill}, decode at {decode}{moved}"
