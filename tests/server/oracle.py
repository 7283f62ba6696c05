"""What transformers itself computes for a model directory: the truth of the server's tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class Oracle:
    """float32, one sequence at a time. Remembers what it generated: servers share the answers."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._greedy: dict[tuple[int, ...], list[int]] = {}

    @cached_property
    def model(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self._directory, dtype=torch.float32).eval()

    @cached_property
    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self._directory)

    @property
    def eos(self) -> int:
        return int(self.tokenizer.eos_token_id)

    def greedy(self, prompt_ids: Sequence[int], max_tokens: int) -> list[int]:
        """What generate appends to the prompt; EOS ends it and is its last token."""
        known = self._greedy.get(tuple(prompt_ids), [])
        if len(known) < max_tokens and known[-1:] != [self.eos]:
            known = self.generate(prompt_ids, max_tokens)
            self._greedy[tuple(prompt_ids)] = known
        return known[:max_tokens]

    def generate(self, prompt_ids: Sequence[int], max_tokens: int, **options: Any) -> list[int]:
        ids = self.model.generate(
            torch.tensor([list(prompt_ids)]),
            attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
            **({"eos_token_id": self.eos} | options),
        )
        return ids[0, len(prompt_ids) :].tolist()

    @torch.inference_mode()
    def logprobs(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> list[float]:
        """Log-softmax of the logits at each output token, from one forward pass."""
        ids = torch.tensor([[*prompt_ids, *output_ids]])
        logits = self.model(ids).logits[0, len(prompt_ids) - 1 : -1]
        chosen = torch.tensor(list(output_ids)).unsqueeze(-1)
        return torch.log_softmax(logits.float(), -1).gather(-1, chosen).squeeze(-1).tolist()

    def text(self, output_ids: Sequence[int], finish_reason: str = "length") -> str:
        """The token that stopped the output is not part of its text."""
        shown = output_ids[:-1] if finish_reason == "stop" else output_ids
        return str(self.tokenizer.decode(list(shown), skip_special_tokens=True))

    @torch.inference_mode()
    def prompt_whose_first_token(self, fits: Callable[[int], bool], length: int = 4) -> list[int]:
        """A random prompt after which ``fits`` is true of the greedy token; for tiny models."""
        generator = torch.Generator().manual_seed(length)
        for _ in range(20):
            shape = (1024, length)
            ids = torch.randint(3, self.model.config.vocab_size, shape, generator=generator)
            first = self.model(ids).logits[:, -1].argmax(-1).tolist()
            for row, token in enumerate(first):
                if fits(token):
                    return ids[row].tolist()
        raise AssertionError("no such prompt was found")


def random_prompt(length: int, vocab_size: int, seed: int = 0) -> list[int]:
    """No two prompts of different length or seed share a first block."""
    return random.Random(f"{length}/{seed}").choices(range(3, vocab_size), k=length)
