"""Chat traffic: lengths distributed like those of ShareGPT."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tandem_perf.requests import BenchRequest, Session, single
from tandem_perf.workloads.base import WorkloadOptions, generator, length_class
from tandem_perf.workloads.prompts import random_ids

# Means of ShareGPT: Kwon et al., "Efficient Memory Management for Large Language Model Serving
# with PagedAttention" (SOSP 2023, arXiv 2309.06180), figure 11.
MEAN_PROMPT_TOKENS, MEAN_OUTPUT_TOKENS = 161.31, 337.99
# What vLLM's serving benchmark leaves out when it samples ShareGPT.
MIN_TOKENS, MAX_PROMPT_TOKENS, MAX_TOTAL_TOKENS = 4, 1024, 2048
# The paper gives no variance: the sigmas are our choice, for the long tails of its histograms.
# With these medians (found numerically) what is not left out has the paper's means.
PROMPT_MEDIAN, PROMPT_SIGMA = 96, 1.3
OUTPUT_MEDIAN, OUTPUT_SIGMA = 244, 0.9


@dataclass(frozen=True)
class Chat:
    """Lognormal prompt and output lengths, drawn independently; prompts are all different."""

    options: WorkloadOptions
    name: str = "chat"

    def sessions(self, seed: int) -> Iterator[Session]:
        rng = generator(seed)
        number = 0
        while True:
            prompt = round(rng.lognormal(math.log(PROMPT_MEDIAN), PROMPT_SIGMA))
            output = round(rng.lognormal(math.log(OUTPUT_MEDIAN), OUTPUT_SIGMA))
            if not is_kept(prompt, output):
                continue
            yield single(
                BenchRequest(
                    request_id=f"{number}",
                    length_class=length_class(prompt),
                    max_tokens=output,
                    input_ids=random_ids(rng, prompt, self.options.token_range),
                    prompt_tokens=prompt,
                    ignore_eos=self.options.ignore_eos,
                )
            )
            number += 1


def is_kept(prompt_tokens: int, output_tokens: int) -> bool:
    return (
        min(prompt_tokens, output_tokens) >= MIN_TOKENS
        and prompt_tokens <= MAX_PROMPT_TOKENS
        and prompt_tokens + output_tokens < MAX_TOTAL_TOKENS
    )
