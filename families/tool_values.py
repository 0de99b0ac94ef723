"""Values of arguments that a model writes as plain text: their type follows from the tool's JSON schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from families.tool_steps import SPACE, Cursor, Mismatch, json_steps

TYPES: dict[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array", type(None): "null",
}  # fmt: skip
"""JSON's types by those of `json.loads`."""
PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}
"""JSON by Python's names. Chat templates print such values of earlier calls by these, so models write them, too."""
_DEEPEST = 16
"""Number of references and combinations that are followed."""


def kinds_of(schema: Mapping[str, Any], key: str) -> frozenset[str] | None:
    """JSON types that the value of `key` may have in an object of this schema; None: any."""
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    return _kinds(found, schema, _DEEPEST)


def only_string(schema: Mapping[str, Any], key: str) -> bool:
    """Whether the value can only be a string, which is the text itself then."""
    return kinds_of(schema, key) == frozenset({"string"})


def typed(text: str, schema: Mapping[str, Any], key: str) -> str:
    """JSON of a value that was written as `text`. What is no JSON of a type that the schema allows is a string."""
    kinds = kinds_of(schema, key)
    told = PYTHON_NAMES.get(text.strip(), text.strip())
    try:
        kind = TYPES[type(json_value(told))]
    except ValueError:
        return json_text(text)
    if kind == "string":  # quotation marks would belong to it
        return json_text(text) if kinds is None or "string" in kinds else told
    if kind == "number" and kinds is not None and "number" not in kinds and float(told).is_integer():
        kind = "integer"
    if kinds is None:
        return told if told == text.strip() else json_text(text)
    return told if kind in kinds or (kind == "integer" and "number" in kinds) else json_text(text)


def json_value(text: str) -> Any:
    """The value of a JSON text. Raises ValueError for other texts, for constants such as NaN, and for what `json_steps`
    does not accept: among others, too many levels, each of which would be a call within a call here."""
    if text.lstrip(SPACE).startswith(("{", "[")):
        cursor = Cursor(text, final=True)
        try:
            for _ in json_steps(cursor):
                pass
        except Mismatch:
            raise ValueError("not JSON") from None
    return json.loads(text, parse_constant=_refuse)


def json_text(value: Any) -> str:
    """JSON with its characters as they are, if they can be sent: half of a surrogate pair cannot. Raises ValueError for
    infinite numbers, which JSON cannot hold, but a number like 1e999 is read as one."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if text.isascii() or not any("\ud800" <= c <= "\udfff" for c in text) else json.dumps(value)


def _kinds(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str] | None:
    if not isinstance(schema, Mapping) or not depth:
        return None
    if isinstance(reference := schema.get("$ref"), str):
        return _kinds(_resolved(reference, root), root, depth - 1)
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset({declared})
    if isinstance(declared, list):
        return frozenset(kind for kind in declared if isinstance(kind, str))
    if "const" in schema:
        return frozenset({_type_name(schema["const"])})
    if isinstance(values := schema.get("enum"), list):
        return frozenset(map(_type_name, values))
    for name in ("anyOf", "oneOf"):
        if isinstance(choices := schema.get(name), list):
            found = [_kinds(choice, root, depth - 1) for choice in choices]
            return None if None in found else frozenset().union(*(kinds for kinds in found if kinds is not None))
    if isinstance(parts := schema.get("allOf"), list):
        known = [kinds for part in parts if (kinds := _kinds(part, root, depth - 1)) is not None]
        return frozenset.intersection(*known) if known else None
    return None


def _resolved(reference: str, root: Mapping[str, Any]) -> Any:
    """What a reference within the schema refers to; None for others."""
    if not reference.startswith("#"):
        return None
    found: Any = root
    for name in reference[1:].split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _type_name(value: Any) -> str:
    return TYPES.get(type(value), "string")


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
