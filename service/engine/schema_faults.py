"""Finds the place in a JSON schema of a fault that the grammar compiler reports without its place.

The schema's parts are compiled alone. If one of them has the same fault, the fault is within it. At the innermost such
part, the faulty keyword is the one without which the message changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from service.common.types import TextFormat
from service.engine.format_parts import BY_NAME, schemas_of

SECONDS = 0.25
"""Limit on the seconds of processor time of a search. When it is reached, the part found so far, which contains the
fault, is the result."""
MAX_POINTER = 150
"""Largest number of characters of a pointer."""
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = (
    "items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else", "propertyNames",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_Path = tuple[str, ...]


def pointer_of_fault(schema: Any, message: str, fault: Callable[[Any], str]) -> str:
    """The JSON pointer (RFC 6901) to what `message` is about, or to a part that contains it; empty for the whole
    schema. At most MAX_POINTER characters, shortened at the end.

    `fault`: compiles a schema and returns the message of its fault, empty without one.
    """
    if not isinstance(schema, dict):
        return ""
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    until = time.thread_time() + SECONDS

    def same(part: Any) -> bool:
        """Whether a part has the fault. Its references to shared parts mean the same as in the whole schema."""
        if time.thread_time() > until:
            return False
        return fault(shared | part if isinstance(part, dict) else part) == message

    path: _Path = ()
    part: dict[str, Any] = schema
    seen: set[_Path] = {path}
    while (inner := _faulty(path, part, schema, seen, same)) is not None:
        path, part = inner
    keywords = [name for name in part if not same({key: value for key, value in part.items() if key != name})]
    if len(keywords) == 1 and time.thread_time() <= until:
        path = (*path, keywords[0])
    return pointer(path)


def pointer(path: Sequence[str]) -> str:
    """The JSON pointer (RFC 6901) of these keys; at most MAX_POINTER characters, shortened at the end."""
    made = "".join(f"/{name.replace('~', '~0').replace('/', '~1')}" for name in path)
    return made if len(made) <= MAX_POINTER else f"{made[: MAX_POINTER - 3]}..."


def _faulty(
    path: _Path, part: Mapping[str, Any], schema: Any, seen: set[_Path], same: Callable[[Any], bool]
) -> tuple[_Path, dict[str, Any]] | None:
    """The first part directly within `part` that has the fault. `seen`: paths that were tried, to which this adds;
    parts that refer to one of them are skipped."""
    for inner_path, inner in _parts(path, part, schema):
        if inner_path not in seen and isinstance(inner, dict) and target_path(inner) not in seen:
            seen.add(inner_path)
            if same(inner):
                return inner_path, inner
    return None


def _parts(path: _Path, part: Mapping[str, Any], schema: Any) -> Iterator[tuple[_Path, Any]]:
    """The schemas within a schema, and the one that it refers to, with their paths."""
    for name in BY_NAME:
        if isinstance(part.get(name), dict):
            yield from (((*path, name, key), value) for key, value in part[name].items())
    for name in _LISTS:
        if isinstance(part.get(name), list):
            yield from (((*path, name, str(i)), value) for i, value in enumerate(part[name]))
    yield from (((*path, name), part[name]) for name in _SINGLE if name in part)
    if (target := target_path(part)) is not None:
        yield target, at_path(schema, target)


def at_path(schema: Any, path: _Path) -> Any:
    """The value at a path; None if there is none."""
    for name in path:
        schema = schema.get(name) if isinstance(schema, dict) else None
    return schema


def target_path(part: Mapping[str, Any]) -> _Path | None:
    """The path that a schema refers to; None if it refers to nothing, to the whole document, or by a name."""
    reference = part.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    return tuple(name.replace("~1", "/").replace("~0", "~") for name in reference[2:].split("/"))


def located(format: TextFormat, message: str, fault: Callable[[Any], str]) -> str:
    """`message`, followed by the place of the fault if it is in one of the format's JSON schemas."""
    for name, schema in schemas_of(format):
        if fault(schema) == message:
            place = pointer_of_fault(schema, message, fault)
            return f"{name}{message}{place and f', at {place}'}"
    return message
