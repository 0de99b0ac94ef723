"""Validates JSON documents with Pydantic models; errors name the field."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from saccade.errors import InvalidArgument

ModelT = TypeVar("ModelT", bound=BaseModel)

_EXPECTED = {
    "model_type": "expected an object",
    "dict_type": "expected an object",
    "list_type": "expected a list",
    "none_required": "it is not supported",
}
"""Replacements for Pydantic's messages that name Python's types."""
MAX_PROBLEMS = 4
"""Most problems of a document that its error describes, and most unknown keys that it names."""
MOST_COUNTED = 1000
"""Most problems of a document that are examined; each takes memory and time."""


def validated(model: type[ModelT], document: Any) -> ModelT:
    """The document as an instance of `model`. Raises InvalidArgument with a description of the first problems."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        if (count := error.error_count()) > MOST_COUNTED:
            raise InvalidArgument(f"{count} unknown keys or wrong values, more than {MOST_COUNTED}") from None
        raise InvalidArgument("; ".join(_problems(error))) from None
    except RecursionError:
        raise InvalidArgument("nested too deeply") from None


def _problems(error: ValidationError) -> list[str]:
    """A sentence for each problem; unknown keys of one object are one problem."""
    found: list[str] = []
    unknown: dict[str, list[str]] = {}
    for item in error.errors(include_url=False, include_context=False):
        path = item["loc"]
        if item["type"] == "extra_forbidden":
            unknown.setdefault(field_path(path[:-1]), []).append(str(path[-1])[:60])
        elif item["type"] == "value_error":
            found.append(_at(path, item["msg"].removeprefix("Value error, ")))
        else:
            words = _EXPECTED.get(item["type"], item["msg"][:1].lower() + item["msg"][1:])
            found.append(_at(path, words if item["type"] == "missing" else f"{words}, got {short(item['input'])}"))
    for parent, names in unknown.items():
        listed = ", ".join(sorted(names)[:MAX_PROBLEMS])
        if len(names) > MAX_PROBLEMS:
            listed += f" and {len(names) - MAX_PROBLEMS} more"
        found.append(f"{parent}: unknown keys {listed}" if parent else f"{listed}: unknown field")
    return found if len(found) <= MAX_PROBLEMS else [*found[:MAX_PROBLEMS], f"and {len(found) - MAX_PROBLEMS} more"]


def _at(path: tuple[int | str, ...], words: str) -> str:
    name = field_path(path)
    return f"{name}: {words}" if name else words


def field_path(path: tuple[int | str, ...]) -> str:
    """`("messages", 0, "<parts>", "role")` -> `messages[0].role`. Names in angle brackets are branches of a type."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        elif not (step.startswith("<") or step == "[key]"):
            text += f".{step[:60]}" if text else step[:60]
    return text


def short(value: Any) -> str:
    """A value in at most 60 characters."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return f"an object of type {short(value['type'])}" if "type" in value else f"an object with {len(value)} keys"
    text = repr(value[:80] if isinstance(value, str) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."
