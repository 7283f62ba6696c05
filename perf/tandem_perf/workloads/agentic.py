"""Sessions of several turns, each prompt the whole conversation so far, as agents send them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tandem_perf.requests import BenchRequest, Session
from tandem_perf.workloads.base import WorkloadOptions, generator
from tandem_perf.workloads.prompts import random_ids

NUM_TURNS = 4
FIRST_PROMPT_TOKENS = 512
NEW_TOKENS_PER_TURN = 128  # the tool's result or the user's next message
OUTPUT_TOKENS = 32
MEAN_THINK_S = 1.0  # exponential


@dataclass(frozen=True)
class Agentic:
    """Prompt k = prompt k−1 + filler as long as its answer + new tokens.

    The filler stands for the answer, so that prompts do not depend on the target; a prefix
    cache finds prompt k−1 but not the answer.
    """

    options: WorkloadOptions
    name: str = "agentic"

    def sessions(self, seed: int) -> Iterator[Session]:
        number = 0
        while True:
            yield self._session(seed, number)
            number += 1

    def _session(self, seed: int, number: int) -> Session:
        rng = generator(seed, number)
        prompt = random_ids(rng, FIRST_PROMPT_TOKENS, self.options.token_range)
        requests = []
        for turn in range(NUM_TURNS):
            if turn:
                grown_by = OUTPUT_TOKENS + NEW_TOKENS_PER_TURN
                prompt = prompt + random_ids(rng, grown_by, self.options.token_range)
            requests.append(
                BenchRequest(
                    request_id=f"{number}.{turn}",
                    length_class="first turn" if turn == 0 else "later turn",
                    max_tokens=OUTPUT_TOKENS,
                    input_ids=prompt,
                    prompt_tokens=len(prompt),
                    ignore_eos=self.options.ignore_eos,
                )
            )
        think_times_s = (0.0, *rng.exponential(MEAN_THINK_S, NUM_TURNS - 1).tolist())
        return Session(requests=tuple(requests), think_times_s=think_times_s)
