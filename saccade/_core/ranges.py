"""Ranges of sampling parameters, equal to the server's, so that invalid requests are refused before they are sent.

A test compares them with the server's.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable
from numbers import Real
from pathlib import Path
from typing import Any

from saccade.errors import InvalidArgument
from saccade.v1 import inference_pb2, types_pb2

MAX_BIAS = 1e10
"""Magnitude of a bias or an additive penalty."""
MAX_STOP_STRINGS, MAX_STOP_LENGTH = 32, 256
MAX_REQUEST_ID = 128
MAX_SECONDS = 10**9
"""Of a timeout: larger numbers overflow in gRPC and in Python's locks."""
_RANGES: dict[str, tuple[float, float]] = {
    "max_tokens": (1, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
    "temperature": (0, 1e6),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0, 1),
    "repetition_penalty": (1e-3, 1e3),
    "presence_penalty": (-MAX_BIAS, MAX_BIAS),
    "frequency_penalty": (-MAX_BIAS, MAX_BIAS),
    "n": (1, 64),
    "logprobs": (0, 100),
    "prompt_logprobs": (0, 100),
    "max_reasoning_tokens": (0, 2**31 - 1),
}
"""Smallest and largest value; both are allowed."""
_OTHERS = {"seed": (0, 2**64 - 1), "priority": (-(2**31), 2**31 - 1), "max_errors": (0, 2**63 - 1)}
"""The same for arguments that are not in SamplingParams, or whose largest value a double cannot hold."""


def check_integer(name: str, value: Any) -> int:
    """The value of an integer argument. Raises InvalidArgument with the range, which protobuf's own error lacks."""
    if not hasattr(type(value), "__index__"):
        raise InvalidArgument(f"{name}: expected an integer, got {value!r}")
    number = operator.index(value)
    low, high = _OTHERS.get(name) or _RANGES[name]
    if not low <= number <= high:
        raise InvalidArgument(f"{name} is {number}; it must be from {_exact(low)} to {_exact(high)}", field=name)
    return number


def check_count(name: str, value: Any, least: int) -> int:
    """The value of an integer argument without an upper limit. Raises InvalidArgument."""
    if not hasattr(type(value), "__index__"):
        raise InvalidArgument(f"{name}: expected an integer, got {value!r}")
    if operator.index(value) < least:
        raise InvalidArgument(f"{name}: expected {least} or more, got {value}")
    return operator.index(value)


def check_flag(name: str, value: Any) -> bool:
    """The value of a flag, which may also be numpy's, 0 or 1. Raises InvalidArgument for other values: `bool` would
    take any string for true."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str | bytes) or getattr(value, "shape", ()) != () or value not in (0, 1):
        raise InvalidArgument(f"{name}: expected True or False, got {value!r}")
    return bool(value)


def check_seconds(name: str, value: Any) -> None:
    """Raises InvalidArgument unless a timeout is a number of seconds, or None for no limit."""
    is_number = isinstance(value, Real)
    if value is not None and not (is_number and 0 < value <= MAX_SECONDS):
        raise InvalidArgument(f"{name}: expected more than 0 and at most {MAX_SECONDS} seconds, or None, got {value!r}")


def check_text(name: str, text: str) -> str:
    """The text. Raises InvalidArgument if no message can hold it: JSON's \\u escapes can write half of a surrogate
    pair, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{name}: half of a surrogate pair, at character {error.start}") from None
    return text


def check_string(name: str, value: Any) -> str:
    """The value of a string argument. Raises InvalidArgument."""
    if not isinstance(value, str):
        raise InvalidArgument(f"{name}: expected a string, got {type(value).__name__}")
    return check_text(name, value)


def file_reason(error: OSError | ValueError) -> str:
    """Why a file cannot be opened. A ValueError is raised for a path with a null byte."""
    return str(error.strerror if isinstance(error, OSError) else error)


def check_path(name: str, value: Any) -> Path:
    """The value of an argument that is a path. Raises InvalidArgument."""
    if not isinstance(value, str | os.PathLike):
        raise InvalidArgument(f"{name}: expected a path, got {type(value).__name__}")
    return Path(value)


def check_strings(name: str, values: Any) -> list[str]:
    """A string, or several, as a list. Raises InvalidArgument with the position of the first value of another type."""
    if isinstance(values, str):
        return [check_text(name, values)]
    if isinstance(values, bytes) or not isinstance(values, Iterable):
        raise InvalidArgument(f"{name}: expected a string or a list of strings, got {type(values).__name__}")
    strings = list(values)
    return [check_string(f"{name}[{i}]", value) for i, value in enumerate(strings)]


def check_request(request: inference_pb2.GenerateRequest) -> None:
    """Raises InvalidArgument with the name of the argument, its value and its range."""
    if len(request.request_id) > MAX_REQUEST_ID:
        raise InvalidArgument(
            f"request_id has {len(request.request_id)} characters; at most {MAX_REQUEST_ID} are allowed",
            field="request_id",
        )
    _check_numbers(request.sampling)
    _check_lists(request.sampling)
    if request.continued_token_ids and request.sampling.n > 1:
        raise InvalidArgument(f"n is {request.sampling.n}; with continued_token_ids it must be 1", field="n")


def _check_numbers(sampling: types_pb2.SamplingParams) -> None:
    for name, (low, high) in _RANGES.items():
        value = getattr(sampling, name)
        if sampling.HasField(name) and not low <= value <= high:  # type: ignore[arg-type]
            raise InvalidArgument(f"{name} is {_exact(value)}; it must be from {low:g} to {_exact(high)}", field=name)
    if sampling.HasField("top_p") and not 0 < sampling.top_p <= 1:
        raise InvalidArgument(f"top_p is {_exact(sampling.top_p)}; it must be above 0 and at most 1", field="top_p")
    if sampling.HasField("max_tokens") and sampling.min_tokens > sampling.max_tokens:
        raise InvalidArgument(
            f"min_tokens {sampling.min_tokens} is above max_tokens {sampling.max_tokens}", field="min_tokens"
        )


def _exact(value: float) -> str:
    """With six digits, if these are the number."""
    short = f"{value:g}"
    return str(value) if isinstance(value, int) or float(short) != value else short


def _check_lists(sampling: types_pb2.SamplingParams) -> None:
    if len(sampling.stop) > MAX_STOP_STRINGS:
        raise InvalidArgument(
            f"stop has {len(sampling.stop)} strings; at most {MAX_STOP_STRINGS} are allowed", field="stop"
        )
    for i, stop in enumerate(sampling.stop):
        if not 1 <= len(stop) <= MAX_STOP_LENGTH:
            raise InvalidArgument(
                f"stop[{i}] has {len(stop)} characters; it must have from 1 to {MAX_STOP_LENGTH}", field=f"stop[{i}]"
            )
    for token, bias in sampling.logit_bias.items():
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise InvalidArgument(
                f"logit_bias of token {token} is {bias}; it must be from {-MAX_BIAS:g} to {MAX_BIAS:g}",
                field="logit_bias",
            )
