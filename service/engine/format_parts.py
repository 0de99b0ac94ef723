"""The JSON schemas, regular expressions, Lark grammars and fixed texts of a format. Each is a pair of a prefix for
messages, which names the part, and the part itself."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from service.common.types import TextFormat

BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords of JSON Schema whose values are schemas by name."""


def schemas_of(format: TextFormat) -> Iterator[tuple[str, Any]]:
    """The schemas of a format, without those within its Lark grammars."""
    if format.kind == "tool_calls":
        for tool in json.loads(format.source)["tools"]:
            if tool["schema"] is not None:
                yield f"tool {tool['name']!r}: ", tool["schema"]
    for name, kind, source in _parts(format):
        if kind == "json_schema":
            yield name, json.loads(source)


def all_schemas(format: TextFormat) -> Iterator[tuple[str, Any]]:
    """The schemas of a format, with those within its Lark grammars. Text that cannot be parsed is skipped, since the
    compiler does not accept it as a schema either."""
    yield from schemas_of(format)
    for _, lark in grammars_of(format):
        for found in re.finditer(r"%json[ \t\r\n]*", lark):
            try:
                yield "%json: ", json.JSONDecoder().raw_decode(lark, found.end())[0]
            except (ValueError, RecursionError):
                pass


def grammars_of(format: TextFormat) -> Iterator[tuple[str, str]]:
    """The Lark grammars of a format."""
    return ((name, source) for name, kind, source in _parts(format) if kind == "lark")


def expressions_of(format: TextFormat) -> Iterator[tuple[str, str]]:
    """The regular expressions of a format, without those of its schemas and grammars."""
    return ((name, source) for name, kind, source in _parts(format) if kind == "regex")


def texts_of(format: TextFormat) -> Iterator[tuple[str, str]]:
    """The fixed texts of a format, without those of its schemas and grammars."""
    for name, kind, source in _parts(format):
        if kind == "choice":
            yield from ((name, text) for text in json.loads(source))
    if format.kind == "structural_tags":
        for i, tag in enumerate(json.loads(format.source)["tags"]):
            yield from ((f"tags[{i}].{end}: ", tag[end]) for end in ("begin", "end"))


def _parts(format: TextFormat) -> Iterator[tuple[str, str, str]]:
    """The name, kind and source of a format's parts other than tools."""
    match format.kind:
        case "structural_tags":
            for i, tag in enumerate(json.loads(format.source)["tags"]):
                yield f"tags[{i}].{tag['kind']}: ", tag["kind"], tag["content"]
        case "tool_calls":
            if answer := json.loads(format.source)["answer"]:
                yield "response_format: ", answer[0], answer[1]
        case _:
            yield "", format.kind, format.source
