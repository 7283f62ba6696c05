"""From what a client sent to a ``GenerateRequest``, or to an error that names field and limit.

A field may come as a tensor, as a request parameter (where Triton's generate endpoint puts the
keys that are no inputs) or in the JSON of ``sampling_parameters``, but only once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy.typing as npt

from tandem.config import OrchestratorSettings
from tandem.errors import InvalidRequest
from tandem.orchestrator.chat_messages import parse_messages
from tandem.orchestrator.contract_fields import FIELDS, PROMPTS, Field, Scalar, shown
from tandem.orchestrator.generate_request import GenerateRequest
from tandem.orchestrator.path_costs import Path

_Values = dict[str, Any]

# Request parameters that Triton sets or reads itself, beside all that begin with triton_.
_TRITON_PARAMETERS = {"sequence_id", "sequence_start", "sequence_end"}

PATH_PARAMETER = "tandem_path"  # of probes: which way a request takes, whatever the policy

_SAMPLING_FIELDS = FIELDS.keys() - {*PROMPTS, "sampling_parameters"}


def parse_request(
    inputs: Mapping[str, npt.NDArray[Any]],
    parameters: Mapping[str, Scalar],
    settings: OrchestratorSettings,
) -> GenerateRequest:
    """The request in the input tensors and request parameters of one Triton request.

    Raises ``InvalidRequest`` for a field that is unknown, given twice, of a wrong type or shape or
    beyond its limit, and unless exactly one prompt is given.
    """
    values: _Values = {}
    for name, array in inputs.items():
        _put(values, name, _field(name).from_tensor(array))
    for name, value in parameters.items():
        if name == PATH_PARAMETER:
            values["path"] = _path(value)
        elif name not in _TRITON_PARAMETERS and not name.startswith("triton_"):
            _put(values, name, _field(name).from_value(value))
    _put_sampling_parameters(values, values.pop("sampling_parameters", "{}"))
    _check_together(values, settings)
    if "messages" in values:
        values["messages"] = parse_messages(values["messages"])
    return GenerateRequest(**values)


def _path(value: object) -> Path:
    if not isinstance(value, str) or value not in tuple(Path):
        raise InvalidRequest(PATH_PARAMETER, f"must be {' or '.join(Path)}; got {shown(value)}")
    return Path(value)


def _field(name: str, known: Iterable[str] = FIELDS) -> Field:
    if name not in known:
        raise InvalidRequest(name[:80], f"unknown; the known fields are {', '.join(sorted(known))}")
    return FIELDS[name]


def _put(values: _Values, name: str, value: object) -> None:
    if name in values:
        raise InvalidRequest(
            name, "given twice: send it as input, as parameter or in sampling_parameters, once"
        )
    values[name] = value


def _put_sampling_parameters(values: _Values, text: str) -> None:
    """The fields of a JSON object; null means not given.

    A number may be written as a string: so do genai-perf and the clients of Triton's vLLM backend.
    """
    try:
        given = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest("sampling_parameters", f"must be a JSON object: {error}") from error
    for name, value in given.items():
        field = _field(name, _SAMPLING_FIELDS)
        if field.is_number and isinstance(value, str):
            value = _number(value)
        if value is not None:
            _put(values, name, field.from_value(value))


def _number(text: str) -> object:
    """The number that a text spells in JSON, or else the text itself."""
    try:
        return msgspec.json.decode(text, type=int | float)
    except msgspec.DecodeError:
        return text


def _check_together(values: _Values, settings: OrchestratorSettings) -> None:
    """The limits that concern several fields, the size of the prompt, or the settings."""
    given = [name for name in PROMPTS if name in values]
    if len(given) != 1:
        raise InvalidRequest(
            given[1] if given else "text_input",
            f"exactly one of {', '.join(PROMPTS)} must be given; "
            f"got {' and '.join(given) if given else 'none'}",
        )
    prompt = values[given[0]]
    if not prompt:
        raise InvalidRequest(given[0], "must not be empty")
    if isinstance(prompt, str) and (size := len(prompt.encode())) > settings.max_prompt_bytes:
        raise InvalidRequest(
            given[0], f"must be at most {settings.max_prompt_bytes} bytes; got {size}"
        )
    for name, limit, what in (
        ("stop", settings.max_stop_strings, "strings"),
        ("stop_token_ids", settings.max_stop_token_ids, "ids"),
    ):
        if (count := len(values.get(name, ()))) > limit:
            raise InvalidRequest(name, f"must be at most {limit} {what}; got {count}")
    min_tokens, max_tokens = values.get("min_tokens", 0), values.get("max_tokens")
    if max_tokens is not None and min_tokens > max_tokens:
        raise InvalidRequest(
            "min_tokens", f"must be at most max_tokens = {max_tokens}; got {min_tokens}"
        )
