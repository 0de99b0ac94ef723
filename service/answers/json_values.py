"""Reads JSON that a client sent as text in a field of a message."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

from saccade._core.json_nesting import excessive_nesting, excessive_size
from service.answers.bounds import check_length
from service.common import errors

MAX_NESTING = 100
"""Largest depth of nested objects and arrays."""


def json_value(field: str, text: str, most: int) -> Any:
    """Parses JSON of 1 to `most` characters. Raises InvalidArgument with the name of the field."""
    try:
        value = _parsed(field, text, most, float)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise errors.InvalidArgument(
            f"{field} has a \\u escape that is half of a surrogate pair", field=field
        ) from None
    except ValueError as error:
        raise errors.InvalidArgument(f"{field} is not valid JSON: {error}", field=field) from None
    return value


def json_object(field: str, text: str, most: int) -> dict[str, Any]:
    """Like `json_value`, for JSON that must be an object."""
    return _object(field, json_value(field, text, most))


def answered_object(field: str, text: str, most: int) -> dict[str, Any]:
    """Like `json_object`, for JSON that a model may have written. A number that no double holds becomes a string, and
    half of a surrogate pair U+FFFD."""
    try:
        value = _parsed(field, text, most, _float_or_text)
    except ValueError as error:
        raise errors.InvalidArgument(f"{field} is not valid JSON: {error}", field=field) from None
    written = json.dumps(value, ensure_ascii=False)
    if _SURROGATES.search(written):
        value = json.loads(_SURROGATES.sub("\ufffd", written))
    return _object(field, value)


_SURROGATES = re.compile("[\ud800-\udfff]")


def _float_or_text(number: str) -> float | str:
    value = float(number)
    return number if math.isinf(value) else value


def _parsed(field: str, text: str, most: int, parse_float: Callable[[str], Any]) -> Any:
    """The value of the JSON. Raises ValueError for other text, and InvalidArgument if it is too long or too deep."""
    check_length(field, text, most)

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    check_nesting(field, text)
    return json.loads(text, parse_constant=refuse, parse_float=parse_float)


def _object(field: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise errors.InvalidArgument(f"{field} must be a JSON object, not a {type(value).__name__}", field=field)
    return value


def check_nesting(field: str, text: str) -> None:
    """Raises InvalidArgument for JSON that is nested more than `MAX_NESTING` deep."""
    if depth := excessive_nesting(text.encode("utf-8", "surrogatepass"), MAX_NESTING):
        raise errors.InvalidArgument(f"{field} is nested {depth} deep; at most {MAX_NESTING} are allowed", field=field)


def check_json_size(field: str, data: bytes, most_containers: int, most_values: int) -> None:
    """Raises InvalidArgument for JSON with more objects and arrays, or more values and keys."""
    if problem := excessive_size(data, most_containers, most_values):
        raise errors.InvalidArgument(f"{field} has {problem}", reason="MESSAGE_TOO_LARGE", field=field)
