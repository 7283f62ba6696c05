"""Requests of every kind whose right answer is known, and clients that leave in every way."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tandem_cli.server import TandemServer
from tandem_client import AsyncTandemClient, Completion, TandemClient, TandemClientError
from tandem_client.request import build_request
from tandem_client.transports.http_messages import generate_path, request_body

MAX_MODEL_LEN = 512
ANSWERED_WITHIN_S = 90.0
MAX_STAY_S = 1.5  # of a client that leaves
FATES = {"whole": 3, "stream": 5, "leave": 3, "reset": 1, "timeout": 1}  # and their weights
REFUSED_IN_TIME = "its timeout"  # no token came within it, or none would have
LINGER_0 = struct.pack("ii", 1, 0)  # closing sends RST
LENGTHS = (8, 40, 100, 200, 400)  # tokens; policy length sends those from 128 to the prefill pool
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 0.9, "top_p": 0.9, "seed": 1},
    {"temperature": 1.0, "top_k": 40, "min_p": 0.01, "seed": 2},
    {"temperature": 1.0, "presence_penalty": 1.0, "frequency_penalty": 0.5, "seed": 3},
    {"temperature": 1.0, "stop": ["e", "th", "o"], "seed": 4},
    {"temperature": 0.7, "stop": ["the", "zz"], "seed": 5},
)
# Streams for ever in a process of its own, which is there to be killed.
ENDLESS_CLIENT = """
import sys, threading
from tandem_client import TandemClient

def read(url):
    with TandemClient(url) as client:
        while True:
            client.stream("hello the world", max_tokens=400, ignore_eos=True).result()

for url in sys.argv[1:]:
    threading.Thread(target=read, args=(url,)).start()
"""


@dataclass(frozen=True)
class Question:
    params: dict[str, Any]
    answer: Completion

    def is_answered_by(self, got: Completion) -> bool:
        wanted = self.answer
        return (got.text, got.output_ids) == (wanted.text, wanted.output_ids) and (
            got.finish_reason == wanted.finish_reason
        )


def questions(server: TandemServer, count: int, rng: random.Random) -> list[Question]:
    """Their answers are computed one after the other, undisturbed."""
    found = []
    with TandemClient(f"grpc://{server.grpc_address}", timeout=ANSWERED_WITHIN_S) as client:
        for index in range(count):
            length = rng.choice(LENGTHS)
            params = SAMPLING[index % len(SAMPLING)] | {
                "input_ids": rng.choices(range(3, 270), k=length),
                "max_tokens": rng.randint(1, min(250, MAX_MODEL_LEN - length)),
                "ignore_eos": rng.random() < 0.8,
                "return_output_ids": True,
            }
            found.append(Question(params, client.generate(**params)))
    return found


@dataclass
class Tally:
    """What became of the requests. ``wrong`` and ``lost`` say which they were and what came."""

    fates: Counter[str] = field(default_factory=Counter)
    num_tokens: int = 0
    num_retries: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


class Load:
    """``concurrency`` clients that ask question after question until ``stop``."""

    def __init__(
        self, server: TandemServer, questions: Sequence[Question], rng: random.Random
    ) -> None:
        self.tally = Tally()
        self._urls = (f"grpc://{server.grpc_address}", server.http_url)
        self._questions = questions
        self._rng = rng
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        self._stopping.set()

    async def run(self, concurrency: int) -> None:
        async with AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(AsyncTandemClient(url, timeout=ANSWERED_WITHIN_S))
                for url in self._urls
            ]
            await asyncio.gather(
                self._kill_clients(), *(self._ask(clients) for _ in range(concurrency))
            )

    async def _ask(self, clients: Sequence[AsyncTandemClient]) -> None:
        rng = self._rng
        while not self._stopping.is_set():
            question = rng.choice(self._questions)
            [fate] = rng.choices(tuple(FATES), tuple(FATES.values()))
            params = dict(question.params)
            if rng.random() < 0.7:  # or its prompt is found in a prefix cache
                params["cache_salt"] = f"{rng.random()}"
            if fate == "timeout":
                params["timeout"] = round(rng.uniform(0, MAX_STAY_S) * 1e6)
            if fate == "reset":
                await self._reset(params)
            else:
                await self._read(rng.choice(clients), question, params, fate)

    async def _read(
        self, client: AsyncTandemClient, question: Question, params: dict[str, Any], fate: str
    ) -> None:
        """Until the end, unless it leaves before."""
        request = build_request(None, fate != "whole", params)
        stay_s = self._rng.uniform(0, MAX_STAY_S) if fate == "leave" else None
        text, completion = "", None
        try:
            async with asyncio.timeout(stay_s), client.send(request) as stream:
                async for chunk in stream:
                    text += chunk.text
                    completion = chunk.completion
        except TimeoutError:
            self.tally.fates["left"] += completion is None
        except TandemClientError as error:
            if fate == "timeout" and REFUSED_IN_TIME in str(error):
                self.tally.fates["expired"] += 1
            else:
                self.tally.lost.append(f"{type(error).__name__}: {error}; {params}")
        self._judge(question, text, completion, fate, params)

    def _judge(
        self,
        question: Question,
        text: str,
        completion: Completion | None,
        fate: str,
        params: dict[str, Any],
    ) -> None:
        """Whatever came must be right as far as it goes."""
        wanted = question.answer
        is_right = wanted.text.startswith(text)
        if completion is not None:
            self.tally.num_tokens += completion.num_output_tokens
            self.tally.num_retries += completion.timings.retries
            is_cut = fate == "timeout" and completion.finish_reason == "timeout"
            self.tally.fates["cut by timeout" if is_cut else "answered"] += 1
            if is_cut:  # its text may end in a part of a character or of a stop string
                ids = completion.output_ids or ()
                is_right = ids == (wanted.output_ids or ())[: len(ids)]
            else:
                is_right = is_right and question.is_answered_by(completion)
        if not is_right:
            self.tally.wrong.append(f"{params}: {text!r}, {completion}; not {wanted}")

    async def _reset(self, params: dict[str, Any]) -> None:
        """A client whose connection breaks, without a word to the server."""
        request = build_request(None, self._rng.random() < 0.7, params)
        url, body = urlsplit(self._urls[1]), request_body(request)
        head = f"POST {generate_path('llm', request)} HTTP/1.1\r\nhost: {url.netloc}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        _, writer = await asyncio.open_connection(url.hostname, url.port)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_0)
        writer.write(head.encode() + body)
        await asyncio.sleep(self._rng.uniform(0, MAX_STAY_S))
        writer.transport.abort()
        self.tally.fates["reset"] += 1

    async def _kill_clients(self) -> None:
        while not self._stopping.is_set():
            command = [sys.executable, "-c", ENDLESS_CLIENT, *self._urls, *self._urls]
            client = await asyncio.create_subprocess_exec(*command)
            await asyncio.sleep(self._rng.uniform(2, 8))
            client.kill()
            await client.wait()
            self.tally.fates["clients killed"] += 1
