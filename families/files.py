"""Reading the JSON files of a model directory."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class CheckpointError(ValueError):
    """The model directory cannot be served; the message names the file or field and what would work."""


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object; `{"__float__": "Infinity"}`, which released configurations contain, becomes a float. Raises
    CheckpointError."""

    def unwrap(item: dict[str, Any]) -> Any:
        return float(item["__float__"]) if set(item) == {"__float__"} else item

    try:
        value = json.loads(path.read_text("utf-8"), object_hook=unwrap)
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} holds no {path.name}: it is not a model directory") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except RecursionError:
        raise CheckpointError(f"{path} is nested too deeply") from None
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


@contextmanager
def checkpoint_errors(place: str, names: Mapping[str, str] | None = None) -> Iterator[None]:
    """Turns errors inside that a value of a wrong type or size causes (TypeError, ValueError, OverflowError) into
    CheckpointErrors that begin with `place`, a file or a field. `names`: fields of our own descriptions -> what the
    file calls them, for messages."""
    try:
        yield
    except CheckpointError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        message = re.sub(r"\w+", lambda word: (names or {}).get(word[0], word[0]), str(error))
        raise CheckpointError(f"{place}: {message}") from None


def optional_json(path: Path) -> dict[str, Any]:
    """Like `read_json`, but an absent file gives an empty mapping."""
    return read_json(path) if path.exists() else {}


def first(source: Mapping[str, Any], *names: str, default: Any = None) -> Any:
    """The value of the first of `names` that the file has and that is not null."""
    for name in names:
        if source.get(name) is not None:
            return source[name]
    return default


def token_id(name: str, value: Any, vocab_size: int, *, file: str = "config.json") -> int:
    """Checks a token id, which will index logits and embeddings. Raises CheckpointError naming the field `name` and the
    file."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < vocab_size:
        allowed = f"a token id from 0 to {vocab_size - 1} (vocab_size {vocab_size})"
        raise CheckpointError(f"{file}: {name} {value!r} is not {allowed}")
    return value
