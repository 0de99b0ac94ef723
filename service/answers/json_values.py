"""Reads JSON that a client sent as text in a field of a message."""

from __future__ import annotations

import json
from typing import Any

from saccade._core.json_nesting import excessive_nesting
from service.common import errors

MAX_NESTING = 100
"""Largest depth of nested objects and arrays."""


def json_value(field: str, text: str, most: int) -> Any:
    """Parses JSON of 1 to `most` characters. Raises InvalidArgument with the name of the field."""
    if not 1 <= len(text) <= most:
        raise errors.InvalidArgument(f"{field} has {len(text)} characters; it must have from 1 to {most}", field=field)

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    check_nesting(field, text)
    try:
        value = json.loads(text, parse_constant=refuse)
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
    value = json_value(field, text, most)
    if not isinstance(value, dict):
        raise errors.InvalidArgument(f"{field} must be a JSON object, not a {type(value).__name__}", field=field)
    return value


def check_nesting(field: str, text: str) -> None:
    """Raises InvalidArgument for JSON that is nested more than `MAX_NESTING` deep."""
    if depth := excessive_nesting(text.encode("utf-8", "surrogatepass"), MAX_NESTING):
        raise errors.InvalidArgument(f"{field} is nested {depth} deep; at most {MAX_NESTING} are allowed", field=field)
