"""One long system prompt before many different short questions: what a prefix cache is for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tandem_perf.requests import BenchRequest, Session, single
from tandem_perf.workloads.base import WorkloadOptions, generator
from tandem_perf.workloads.prompts import random_ids

SYSTEM_TOKENS = 1024
QUESTION_TOKENS = 64
OUTPUT_TOKENS = 32


@dataclass(frozen=True)
class SharedPrefix:
    """The system prompt is a function of the seed, so a warm-up with another seed caches none."""

    options: WorkloadOptions
    name: str = "shared-prefix"

    def sessions(self, seed: int) -> Iterator[Session]:
        rng = generator(seed)
        system = random_ids(rng, SYSTEM_TOKENS, self.options.token_range)
        number = 0
        while True:
            prompt = system + random_ids(rng, QUESTION_TOKENS, self.options.token_range)
            yield single(
                BenchRequest(
                    request_id=f"{number}",
                    length_class="first" if number == 0 else "shared",
                    max_tokens=OUTPUT_TOKENS,
                    input_ids=prompt,
                    prompt_tokens=len(prompt),
                    ignore_eos=self.options.ignore_eos,
                )
            )
            number += 1
