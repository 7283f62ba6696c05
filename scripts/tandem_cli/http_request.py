"""One HTTP request with the standard library: cheap to import, and enough for Triton's JSON."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

from tandem_cli.errors import CliError


def request(
    url: str,
    method: str,
    path: str,
    body: dict[str, Any] | None,
    timeout_s: float,
    headers: dict[str, str] | None = None,
) -> tuple[int, dict[str, Any]]:
    """Status and JSON of one HTTP request; raises ``CliError`` without an answer."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        content = None if body is None else json.dumps(body)
        connection.request(method, path, content, headers or {})
        response = connection.getresponse()
        text = response.read()
        answer = json.loads(text) if text else {}
        return response.status, answer if isinstance(answer, dict) else {"error": str(answer)}
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise CliError(f"{url}: {error or type(error).__name__}") from error
    finally:
        connection.close()
