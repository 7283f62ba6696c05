"""Times one engine on the cases of ``engine_cases``, step by step. Needs only the standard library
and msgspec, so that another engine's Python runs it too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable

from tandem_perf.engine_cases import Case, Engine, Kind


def time_cases(engine: Engine, all_cases: Iterable[Case], repeats: int) -> dict[str, float]:
    """Case name → ms (decode, prefill) or tokens/s (generate); the median of the repeats."""
    figures = {}
    for case in all_cases:
        values = []
        for repeat in range(repeats + 1):  # the first one warms up
            # Another first token each time: nothing of the last repeat is reused.
            prompts = [[repeat + 100, *prompt[1:]] for prompt in case.prompts]
            values.append(_time_once(engine, case, prompts))
        figures[case.name] = statistics.median(values[1:])
    return figures


def _time_once(engine: Engine, case: Case, prompts: list[list[int]]) -> float:
    for prompt in prompts:
        engine.add(prompt, case.max_tokens)
    started_s = time.perf_counter()
    step_seconds, num_tokens = [], 0
    while engine.num_unfinished:
        step_started_s = time.perf_counter()
        new_tokens = engine.step()
        num_tokens += new_tokens
        if new_tokens == len(prompts):
            step_seconds.append(time.perf_counter() - step_started_s)
    total_s = time.perf_counter() - started_s
    match case.kind:
        case Kind.DECODE:
            # The step that completes the last prefill may count every prompt as well.
            return statistics.median(step_seconds[1:]) * 1e3
        case Kind.PREFILL:
            return total_s * 1e3
        case Kind.GENERATE:
            return num_tokens / total_s
