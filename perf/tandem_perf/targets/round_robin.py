"""Several OpenAI servers in turn, chosen by the sender: the cheapest balancer there is."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

from tandem_perf.requests import BenchRequest
from tandem_perf.targets.base import Answer, OnTokens, TargetOptions
from tandem_perf.targets.openai import OpenAITarget


class RoundRobinTarget:
    """``url`` holds the base URLs, separated by commas."""

    def __init__(self, options: TargetOptions) -> None:
        urls = [url.strip() for url in options.url.split(",")]
        self._targets = [OpenAITarget(replace(options, url=url)) for url in urls]
        self._next_target = cycle(self._targets)

    async def send(self, request: BenchRequest, on_tokens: OnTokens) -> Answer:
        return await next(self._next_target).send(request, on_tokens)

    async def aclose(self) -> None:
        for target in self._targets:
            await target.aclose()
