"""Load with locust, over Triton's gRPC stream and over its server-sent events.

::

    locust -f perf/locustfile.py --headless -u 8 -r 4 -t 30s --host http://localhost:8000
        --grpc-address localhost:8001 [--max-tokens 32] [GrpcUser | SseUser]

Each user sends its next request when the last one has ended. Beside the request itself (type
``grpc`` or ``sse``) every answer fires ``ttft`` once and ``itl`` for each later chunk, so that
locust's own table, charts and CSV have their percentiles.
"""

from __future__ import annotations

import logging
import random
import time
from pathlib import Path
from typing import Any

import grpc.experimental.gevent
from locust import User, constant, events, task

from tandem_client import TandemClient, TandemClientError

grpc.experimental.gevent.init_gevent()  # or else one call blocks all users
logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request

PROMPTS = (Path(__file__).parent / "prompts.txt").read_text().splitlines()


@events.init_command_line_parser.add_listener
def add_options(parser: Any) -> None:
    parser.add_argument("--grpc-address", default="localhost:8001", help="Of GrpcUser.")
    parser.add_argument("--llm", default="llm", help="Name of the model.")
    parser.add_argument("--max-tokens", type=int, default=32, help="Of every answer.")


class StreamingUser(User):
    """One request at a time, streamed; every token is a chunk."""

    abstract = True
    wait_time = constant(0)
    protocol: str

    @property
    def url(self) -> str:
        raise NotImplementedError

    def on_start(self) -> None:
        self.client = TandemClient(self.url, model=self.environment.parsed_options.llm)

    def on_stop(self) -> None:
        self.client.close()

    @task
    def generate(self) -> None:
        started_s = last_s = time.perf_counter()
        num_chunks = num_characters = 0
        error: TandemClientError | None = None
        stream = self.client.stream(
            random.choice(PROMPTS),
            max_tokens=self.environment.parsed_options.max_tokens,
            ignore_eos=True,
            return_output_ids=True,
        )
        try:
            with stream:
                for chunk in stream:
                    now_s = time.perf_counter()
                    self._fire("itl" if num_chunks else "ttft", now_s - last_s, len(chunk.text))
                    last_s = now_s
                    num_chunks += 1
                    num_characters += len(chunk.text)
        except TandemClientError as failure:
            error = failure
        self._fire("request", time.perf_counter() - started_s, num_characters, error)

    def _fire(
        self, name: str, seconds: float, length: int, error: Exception | None = None
    ) -> None:
        self.environment.events.request.fire(
            request_type=self.protocol,
            name=name,
            response_time=seconds * 1e3,
            response_length=length,
            exception=error,
            context={},
        )


class GrpcUser(StreamingUser):
    protocol = "grpc"

    @property
    def url(self) -> str:
        return f"grpc://{self.environment.parsed_options.grpc_address}"


class SseUser(StreamingUser):
    protocol = "sse"

    @property
    def url(self) -> str:
        return str(self.host)
