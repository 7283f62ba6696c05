"""A validated request, and how it becomes the sampling parameters of a sequence."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tandem.errors import InvalidRequest
from tandem.orchestrator.path_costs import Path
from tandem.orchestrator.sampling_defaults import SamplingDefaults
from tandem.types import SamplingParams


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a client asked for; each value is within its limit. None: the model's default.

    Exactly one of ``text_input``, ``messages`` and ``input_ids`` is set.
    """

    text_input: str | None = None
    messages: tuple[dict[str, str], ...] | None = None  # role, content and, if given, name
    input_ids: tuple[int, ...] | None = None
    stream: bool = False
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int = 0
    n: int = 1
    priority: int = 0  # smaller is earlier
    timeout: int = 0  # µs from its arrival to its last token, as Triton's; 0: none
    cache_salt: str = ""  # prefix cache blocks are shared only under one salt
    exclude_input_in_output: bool = True
    return_finish_reason: bool = True
    return_num_input_tokens: bool = True
    return_num_output_tokens: bool = True
    return_timings: bool = True
    return_output_ids: bool = False
    path: Path | None = None  # None: the policy decides

    @property
    def prompt_field(self) -> str:
        """The name of the field that holds the prompt, for messages about it."""
        prompts = ("text_input", "messages", "input_ids")
        return next(name for name in prompts if getattr(self, name) is not None)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises ``InvalidRequest`` for the first token id that the model does not have."""
        fields = {"input_ids": self.input_ids or (), "stop_token_ids": self.stop_token_ids}
        for field, token_ids in fields.items():
            for position, token_id in enumerate(token_ids):
                if not 0 <= token_id < vocab_size:
                    raise InvalidRequest(
                        field,
                        f"token ids must be from 0 to {vocab_size - 1}, the vocabulary of the "
                        f"model; got {token_id} at position {position}",
                    )

    def sampling(
        self,
        defaults: SamplingDefaults,
        prompt_len: int,
        max_model_len: int,
        default_max_tokens: int,
        draw_seed: Callable[[], int],
    ) -> SamplingParams:
        """The parameters with every default resolved, for a prompt of ``prompt_len`` tokens.

        ``default_max_tokens`` counts where neither the request nor the model says; a default is
        clipped to the room that ``max_model_len`` leaves, what the user asked for is refused.
        """
        max_tokens = self._max_tokens(defaults, prompt_len, max_model_len, default_max_tokens)
        eos_token_ids = () if self.ignore_eos else defaults.eos_token_ids
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature if self.temperature is not None else defaults.temperature,
            top_p=self.top_p if self.top_p is not None else defaults.top_p,
            top_k=max(self.top_k if self.top_k is not None else defaults.top_k, 0),
            min_p=self.min_p if self.min_p is not None else defaults.min_p,
            repetition_penalty=(
                self.repetition_penalty
                if self.repetition_penalty is not None
                else defaults.repetition_penalty
            ),
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=self.seed if self.seed is not None else draw_seed(),
            stop_token_ids=tuple(dict.fromkeys(eos_token_ids + self.stop_token_ids)),
            logprobs=self.logprobs > 0,
        )

    def _max_tokens(
        self,
        defaults: SamplingDefaults,
        prompt_len: int,
        max_model_len: int,
        default_max_tokens: int,
    ) -> int:
        if prompt_len == 0:
            raise InvalidRequest(self.prompt_field, "must be at least 1 token; it has none")
        room = max_model_len - prompt_len
        if room < 1:
            raise InvalidRequest(
                self.prompt_field,
                f"must be at most {max_model_len - 1} tokens, since prompt and output share "
                f"{max_model_len}; got {prompt_len}",
            )
        if self.max_tokens is not None:
            if self.max_tokens > room:
                raise InvalidRequest(
                    "max_tokens",
                    f"must be at most {room} after a prompt of {prompt_len} tokens, since prompt "
                    f"and output share {max_model_len}; got {self.max_tokens}",
                )
            return self.max_tokens
        max_tokens = min(defaults.max_new_tokens or default_max_tokens, room)
        if self.min_tokens > max_tokens:
            raise InvalidRequest(
                "min_tokens",
                f"must be at most max_tokens, by default {max_tokens}; got {self.min_tokens}",
            )
        return max_tokens
