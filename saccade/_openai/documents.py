"""Parses JSON documents strictly."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from saccade._core.json_nesting import MAX_NESTING, excessive_nesting, excessive_size
from saccade._core.ranges import check_text
from saccade.errors import InvalidArgument


def load_json(data: bytes) -> Any:
    """The value of a JSON document. Raises InvalidArgument, also for constants such as NaN, for numbers too large for a
    double, for repeated keys, for lone surrogates, for too many values (`excessive_size`) and for values nested more
    than `MAX_NESTING` deep."""

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not a JSON value")

    if problem := excessive_size(data):
        raise InvalidArgument(problem)
    if depth := excessive_nesting(data, MAX_NESTING):
        raise InvalidArgument(f"nested {depth} deep; at most {MAX_NESTING} are allowed")
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=refuse, parse_float=finite, object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"not UTF-8 at byte {error.start}") from error
    except ValueError as error:
        raise InvalidArgument(f"not JSON: {error}") from error
    if _SURROGATE.search(data):
        _check_texts(value)
    return value


_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""The escape of a surrogate; two of them may be a pair, which is one character."""


def _check_texts(document: Any) -> None:
    """Raises InvalidArgument with the path of a string that has a lone surrogate."""
    waiting = [("", document)]
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, str):
            check_text(place or "document", value)
        elif isinstance(value, list):
            waiting += ((f"{place}[{i}]", item) for i, item in enumerate(value))
        elif isinstance(value, dict):
            for key, item in value.items():
                check_text(f"a key of {place or 'the document'}", key)
                waiting.append((f"{place}.{key}" if place else key, item))


def finite(number: str) -> float:
    """The value of a number in JSON. Raises ValueError for one that a double cannot hold."""
    value = float(number)
    if math.isinf(value):
        raise ValueError(f"the number {number[:40]} is outside of the range of doubles")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    built = dict(pairs)
    if len(built) != len(pairs):
        raise ValueError("an object names a key twice")
    return built


def load_object(data: bytes) -> dict[str, Any]:
    """A JSON document that is an object. Raises InvalidArgument."""
    value = load_json(data)
    if not isinstance(value, dict):
        raise InvalidArgument(f"expected an object, got {type(value).__name__}")
    return value
