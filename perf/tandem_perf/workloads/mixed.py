"""Short and long prompts mixed: the traffic in which long prefills stall short streams."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tandem_perf.requests import BenchRequest, Session, single
from tandem_perf.workloads.base import WorkloadOptions, generator
from tandem_perf.workloads.prompts import random_ids

SHORT_TOKENS = 64
OUTPUT_TOKENS = 32
# Each five requests have this mix, in random order: the share is exact in short runs as well.
GROUP = ("short", "short", "short", "long", "long")


@dataclass(frozen=True)
class Mixed:
    """60 % prompts of 64 tokens, 40 % of ``long_tokens``; 32 output tokens."""

    name: str
    long_tokens: int
    options: WorkloadOptions

    def sessions(self, seed: int) -> Iterator[Session]:
        rng = generator(seed)
        number = 0
        while True:
            for kind in rng.permutation(GROUP):
                num_tokens = SHORT_TOKENS if kind == "short" else self.long_tokens
                yield single(
                    BenchRequest(
                        request_id=f"{number}",
                        length_class=str(kind),
                        max_tokens=OUTPUT_TOKENS,
                        input_ids=random_ids(rng, num_tokens, self.options.token_range),
                        prompt_tokens=num_tokens,
                        ignore_eos=self.options.ignore_eos,
                    )
                )
                number += 1
