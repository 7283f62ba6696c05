"""What a user asks for: one value, independent of the protocol that carries it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypedDict

import msgspec

from tandem_client.errors import InvalidRequest

Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class GenerateParams(TypedDict, total=False):
    """Keyword arguments of ``generate`` and ``stream``; None leaves the choice to the server."""

    messages: Sequence[Mapping[str, Any]] | None
    input_ids: Sequence[int] | None
    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    logprobs: int | None
    n: int | None
    priority: int | None
    timeout: int | None  # µs, at the server; the client's own is an argument of the client
    cache_salt: str | None
    sampling_parameters: Mapping[str, Any] | None
    exclude_input_in_output: bool | None
    return_output_ids: bool | None


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The inputs of model ``llm`` by their wire names; None means not sent.

    Only types are checked here: limits and combinations belong to the server, which knows them.
    """

    stream: bool
    text_input: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    input_ids: tuple[Int32, ...] | None = None
    max_tokens: Int32 | None = None
    min_tokens: Int32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Int64 | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[Int32, ...] | None = None
    ignore_eos: bool | None = None
    logprobs: Int32 | None = None
    n: Int32 | None = None
    priority: Int32 | None = None
    timeout: Int64 | None = None
    cache_salt: str | None = None
    sampling_parameters: dict[str, Any] | None = None
    exclude_input_in_output: bool | None = None
    return_output_ids: bool | None = None

    def inputs(self) -> dict[str, Any]:
        """Input name → scalar or tuple, as every protocol sends it; nested values as JSON text."""
        given = {name: getattr(self, name) for name in self.__struct_fields__}
        inputs = {name: value for name, value in given.items() if value is not None}
        for name in ("messages", "sampling_parameters"):
            if name in inputs:
                inputs[name] = msgspec.json.encode(inputs[name]).decode()
        return inputs


def build_request(prompt: str | None, stream: bool, params: Mapping[str, Any]) -> GenerateRequest:
    """The typed request; raises InvalidRequest that names a field of the wrong type."""
    fields = {name: _plain(value) for name, value in params.items() if value is not None}
    if isinstance(fields.get("stop"), str):
        fields["stop"] = [fields["stop"]]
    for name in ("stop", "stop_token_ids"):
        if name in fields and fields[name] in ([], ()):
            del fields[name]  # "no stop" is an absent tensor, not an empty one
    fields |= {"text_input": prompt, "stream": stream}
    try:
        return msgspec.convert(fields, GenerateRequest)
    except msgspec.ValidationError as error:
        raise InvalidRequest(_field_first(str(error))) from error


def _plain(value: Any) -> Any:
    """Arrays (numpy and alike) as lists; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def _field_first(problem: str) -> str:
    """``Expected `int` - at `$.seed` `` → ``seed: Expected `int` ``."""
    what, separator, where = problem.partition(" - at `$.")
    return f"{where.rstrip('`')}: {what}" if separator else what
