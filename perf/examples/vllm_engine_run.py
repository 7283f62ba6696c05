"""vLLM's engine on the cases of ``tandem_perf.engine_cases``; started by ``engine_speed``.

Runs in the Python that vLLM is installed in, which needs msgspec as well (vLLM brings it).
"""

from __future__ import annotations

import json
import os
import sys

sys.path.append(os.environ["TANDEM_PERF_PATH"])
ARGUMENTS = json.loads(sys.argv[1])
CORES = sorted(os.sched_getaffinity(0))[: ARGUMENTS["threads"]]
os.environ |= {
    "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in CORES),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process: nothing in between
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class VllmEngine:
    def __init__(self, model_dir: str) -> None:
        from vllm import LLM

        self._llm = LLM(
            model_dir, dtype="bfloat16", max_model_len=2048, enable_prefix_caching=False
        )
        self._engine = self._llm.llm_engine
        self._num_added = 0
        self._num_tokens: dict[str, int] = {}

    def add(self, prompt_ids: list[int], max_tokens: int) -> None:
        from vllm import SamplingParams

        self._num_added += 1
        params = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        self._engine.add_request(str(self._num_added), {"prompt_token_ids": prompt_ids}, params)

    def step(self) -> int:
        num_new = 0
        for output in self._engine.step():
            count = len(output.outputs[0].token_ids)
            num_new += count - self._num_tokens.get(output.request_id, 0)
            self._num_tokens[output.request_id] = count
        return num_new

    @property
    def num_unfinished(self) -> int:
        return self._engine.get_num_unfinished_requests()


if __name__ == "__main__":
    from tandem_perf.engine_cases import cases
    from tandem_perf.engine_timing import time_cases

    engine = VllmEngine(ARGUMENTS["model"])
    print(json.dumps(time_cases(engine, cases(), ARGUMENTS["repeats"])))
