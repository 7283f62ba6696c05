"""The table of the inputs of ``llm``: name, Triton data type and limit of each field.

The same entry reads a field from a tensor and from JSON or a request parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tandem.errors import InvalidRequest

Scalar = bool | int | float | str

MAX_STOP_BYTES = 1024  # of one stop string
MAX_SAMPLING_PARAMETERS_BYTES = 65_536
MAX_SALT_BYTES = 256


@dataclass(frozen=True)
class _DataType:
    """A Triton data type, the Python type of its values, and which of those it can hold."""

    name: str
    dtype: npt.DTypeLike
    python_type: type[Scalar]
    text: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class _Limit:
    """Which values are allowed, in words and as a test of one value."""

    text: str
    allows: Callable[[Any], bool]


@dataclass(frozen=True)
class Field:
    """One input. Its values are Python scalars, or a tuple of them where it is a list."""

    name: str
    data_type: _DataType
    limit: _Limit | None = None
    is_list: bool = False

    @property
    def is_number(self) -> bool:
        return self.data_type.python_type in (int, float)

    def from_tensor(self, array: npt.NDArray[Any]) -> Scalar | tuple[Scalar, ...]:
        """The value of an input tensor: one element, or for a list one axis of any length."""
        if array.dtype != self.data_type.dtype:
            raise InvalidRequest(
                self.name, f"must be a {self.data_type.name} tensor; got dtype {array.dtype}"
            )
        if array.size != (max(array.shape, default=1) if self.is_list else 1):
            expected = "one axis" if self.is_list else "one element"
            raise InvalidRequest(self.name, f"must have {expected}; got shape {list(array.shape)}")
        values = array.reshape(-1).tolist()
        if self.data_type is _BYTES:
            values = [self._decoded(value) for value in values]
        if self.limit is not None or self.data_type is _FP32:
            for value in values:
                self._check(value)
        return tuple(values) if self.is_list else values[0]

    def from_value(self, value: object) -> Scalar | tuple[Scalar, ...]:
        """The value of JSON or of a request parameter; a list may be given as its one element."""
        if not self.is_list:
            return self._converted(value)
        values = value if isinstance(value, list) else [value]
        return tuple(self._converted(element) for element in values)

    def refused(self, limit: str, value: object) -> InvalidRequest:
        return InvalidRequest(self.name, f"must be {limit}; got {shown(value)}")

    def _decoded(self, value: object) -> str:
        if not isinstance(value, bytes):
            raise self.refused("bytes", value)
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise InvalidRequest(self.name, f"must be valid UTF-8: {error}") from error

    def _converted(self, value: object) -> Scalar:
        is_float = self.data_type.python_type is float
        accepted = (int, float) if is_float else (self.data_type.python_type,)
        # By type and not by instance: a bool is no int here.
        if not isinstance(value, Scalar) or type(value) not in accepted:
            raise self.refused(self.data_type.text, value)
        self._check(value)
        return float(value) if is_float else value

    def _check(self, value: Scalar) -> None:
        if not self.data_type.holds(value):
            raise self.refused(self.data_type.text, value)
        if self.limit is not None and not self.limit.allows(value):
            raise self.refused(self.limit.text, value)


def shown(value: object) -> str:
    """A value for an error message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}... ({len(text)} characters)"


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True


def _bytes_up_to(limit: int) -> _Limit:
    return _Limit(f"from 1 to {limit} bytes long", lambda text: 1 <= len(text.encode()) <= limit)


_FP32_MAX = float(np.finfo(np.float32).max)  # every comparison with NaN is false
_BYTES = _DataType("BYTES", np.object_, str, "a string of valid UTF-8", _is_utf8)
_BOOL = _DataType("BOOL", np.bool_, bool, "true or false", lambda value: True)
_INT32 = _DataType(
    "INT32", np.int32, int, "a whole number of 32 bits", lambda i: -(2**31) <= i < 2**31
)
_INT64 = _DataType(
    "INT64", np.int64, int, "a whole number of 64 bits", lambda i: -(2**63) <= i < 2**63
)
_FP32 = _DataType(
    "FP32", np.float32, float, "a finite number", lambda x: -_FP32_MAX <= x <= _FP32_MAX
)

_UP_TO_1 = _Limit("above 0 and at most 1", lambda x: 0 < x <= 1)
_UP_TO_100 = _Limit("above 0 and at most 100", lambda x: 0 < x <= 100)
_0_TO_1 = _Limit("from 0 to 1", lambda x: 0 <= x <= 1)
_0_TO_100 = _Limit("from 0 to 100", lambda x: 0 <= x <= 100)
_MINUS_2_TO_2 = _Limit("from -2 to 2", lambda x: -2 <= x <= 2)
_FROM_0 = _Limit("at least 0", lambda i: i >= 0)
_FROM_1 = _Limit("at least 1", lambda i: i >= 1)
_PRIORITY = _Limit("from -100 to 100", lambda i: -100 <= i <= 100)
_TOP_K = _Limit("at least 0, or -1 for off", lambda i: i >= -1)
_N = _Limit("1 (only n = 1 is supported)", lambda i: i == 1)
_LOGPROBS = _Limit("0 or 1 (only the sampled token's logprob is offered)", lambda i: 0 <= i <= 1)

FIELDS = {
    field.name: field
    for field in (
        Field("text_input", _BYTES),
        Field("messages", _BYTES),
        Field("input_ids", _INT32, is_list=True),
        Field("stream", _BOOL),
        Field("max_tokens", _INT32, _FROM_1),
        Field("min_tokens", _INT32, _FROM_0),
        Field("temperature", _FP32, _0_TO_100),
        Field("top_p", _FP32, _UP_TO_1),
        Field("top_k", _INT32, _TOP_K),
        Field("min_p", _FP32, _0_TO_1),
        Field("repetition_penalty", _FP32, _UP_TO_100),
        Field("presence_penalty", _FP32, _MINUS_2_TO_2),
        Field("frequency_penalty", _FP32, _MINUS_2_TO_2),
        Field("seed", _INT64),
        Field("stop", _BYTES, _bytes_up_to(MAX_STOP_BYTES), is_list=True),
        Field("stop_token_ids", _INT32, is_list=True),
        Field("ignore_eos", _BOOL),
        Field("logprobs", _INT32, _LOGPROBS),
        Field("n", _INT32, _N),
        Field("priority", _INT32, _PRIORITY),
        Field("timeout", _INT64, _FROM_0),
        Field("cache_salt", _BYTES, _bytes_up_to(MAX_SALT_BYTES)),
        Field("sampling_parameters", _BYTES, _bytes_up_to(MAX_SAMPLING_PARAMETERS_BYTES)),
        Field("exclude_input_in_output", _BOOL),
        Field("return_finish_reason", _BOOL),
        Field("return_num_input_tokens", _BOOL),
        Field("return_num_output_tokens", _BOOL),
        Field("return_timings", _BOOL),
        Field("return_output_ids", _BOOL),
    )
}
PROMPTS = ("text_input", "messages", "input_ids")
