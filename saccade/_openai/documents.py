"""JSON documents -> values."""

from __future__ import annotations

import json
from typing import Any

from saccade.errors import InvalidArgument


def load_json(data: bytes) -> Any:
    """The value of a JSON document. Raises InvalidArgument, also for constants such as NaN and for repeated keys."""

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is no JSON value")

    try:
        return json.loads(data.decode("utf-8"), parse_constant=refuse, object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"not UTF-8 at byte {error.start}") from error
    except RecursionError:
        raise InvalidArgument("nested too deeply") from None
    except ValueError as error:
        raise InvalidArgument(f"not JSON: {error}") from error


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
