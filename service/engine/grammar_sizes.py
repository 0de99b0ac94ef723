"""Limits on the size of a format's parts for which the grammar compiler has none. Its memory and time grow with the
square of the length of a regular expression, also of one to which terminals of a Lark grammar are expanded, and double
with each pattern that one string has to match.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Any

from service.common.types import TextFormat
from service.engine.format_parts import all_schemas, expressions_of, grammars_of, texts_of
from service.engine.schema_faults import at_path, target_path

MAX_EXPRESSION = 2**14
"""Limit on the characters of a regular expression. The worst ones of this length take a second and 140 MB."""
MAX_TERMINAL = 2**16
"""Limit on the characters of a Lark grammar's terminal after other terminals have been written out in it. The worst
ones of this length take a second."""
MAX_TEXT = 2**13
"""Limit on the characters of a fixed text: each step reads the rest of it, which takes two milliseconds."""
MAX_PATTERNS = 16
"""Limit on the patterns and formats that one string has to match, and on the schemas with patterns that are combined
for one object. With most patterns, half as many already take too much memory or time."""
_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/')
_DEFINITION = re.compile(r"^[ \t]*[?!]?(\w+)(?:\{[^}\n]*\}|\[[^]\n]*\]|\.-?\d+|[ \t])*:", re.MULTILINE)
_WITHIN = ("properties", "patternProperties", "additionalProperties", "items", "prefixItems")
_PATTERNS = frozenset(("pattern", "format", "$ref"))
_TERMINAL = re.compile(r"\b_*[A-Z][A-Z0-9_]*\b")


def check_sizes(format: TextFormat) -> None:
    """Raises ValueError for a format with a part that exceeds a limit."""
    for name, expression in expressions_of(format):
        _check_expression(name, expression)
    for name, text in texts_of(format):
        _check_text(name, text)
    for name, grammar in grammars_of(format):
        for literal in _LITERAL.findall(grammar):
            (_check_expression if literal.startswith("/") else _check_text)(name, literal[1:-1])
        _check_terminals(name, grammar)
    for name, schema in all_schemas(format):
        for part in _mappings(schema):
            for expression in _expressions(part):
                _check_expression(name, expression)
            for value in _values(part):
                _check_text(name, json.dumps(value, ensure_ascii=False))
        _check_patterns(name, schema)


def _check_expression(name: str, expression: str) -> None:
    if len(expression) > MAX_EXPRESSION:
        raise ValueError(
            f"{name}a regular expression has {len(expression)} characters; at most {MAX_EXPRESSION} are implemented"
        )


def _check_text(name: str, text: str) -> None:
    if len(text) > MAX_TEXT:
        raise ValueError(f"{name}a fixed text has {len(text)} characters; at most {MAX_TEXT} are implemented")


def _check_terminals(name: str, grammar: str) -> None:
    bodies: dict[str, list[str]] = {}
    found = list(_DEFINITION.finditer(_LITERAL.sub(lambda match: "." * len(match[0]), grammar)))
    for definition, following in pairwise([*found, None]):
        if definition is not None and _TERMINAL.fullmatch(definition[1]):
            body = grammar[definition.end() : None if following is None else following.start()]
            bodies.setdefault(definition[1], []).append(body)
    texts = {terminal: _LITERAL.sub("", " ".join(body)) for terminal, body in bodies.items()}
    uses = {terminal: _TERMINAL.findall(text) for terminal, text in texts.items()}
    sizes: dict[str, int] = {}
    intersections: dict[str, int] = {}
    try:
        order = [*TopologicalSorter(uses).static_order()]
    except CycleError as error:
        raise ValueError(f"{name}the terminal {error.args[1][0]} contains itself") from None
    for each in order:
        inner = uses.get(each, [])
        sizes[each] = sum(map(len, bodies.get(each, ()))) + sum(sizes[other] for other in inner)
        if sizes[each] > MAX_TERMINAL and inner:
            raise ValueError(
                f"{name}the terminal {each} has {sizes[each]} characters when others are written out in it; at most "
                f"{MAX_TERMINAL} are implemented"
            )
        intersections[each] = texts.get(each, "").count("&") + sum(intersections[other] for other in inner)
        if intersections[each] >= MAX_PATTERNS:
            raise ValueError(
                f"{name}the terminal {each} intersects {intersections[each] + 1} expressions; at most {MAX_PATTERNS} "
                "are implemented"
            )


def _mappings(value: Any) -> Iterator[dict[str, Any]]:
    """All mappings within a document: a reference can turn each of them into a schema."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield value
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def _expressions(part: Mapping[str, Any]) -> Iterator[str]:
    if isinstance(part.get("pattern"), str):
        yield part["pattern"]
    if isinstance(part.get("patternProperties"), dict):
        yield from part["patternProperties"]


def _values(part: Mapping[str, Any]) -> Iterator[Any]:
    """The values that a schema lists, each of which becomes a fixed text."""
    if "const" in part:
        yield part["const"]
    if isinstance(part.get("enum"), list):
        yield from part["enum"]


def _check_patterns(name: str, schema: Any) -> None:
    """Counts the patterns that one string has to match for each schema: its own, those of all schemas in `allOf`, of
    the schema that it refers to, and of one schema in `anyOf` or `oneOf`."""
    parts = {id(part): part for part in _mappings(schema)}
    total = sum(isinstance(part.get(key), str) for part in parts.values() for key in ("pattern", "format"))
    if total <= MAX_PATTERNS:
        return
    own = {key: _own(part) for key, part in parts.items()}
    within = {key: [*_all_of(part, schema), *_one_of(part)] for key, part in parts.items()}
    counts: dict[int, int] = {}
    try:
        order = [*TopologicalSorter({key: map(id, inner) for key, inner in within.items()}).static_order()]
    except CycleError:  # the compiler rejects it
        order, counts = [], {0: total}
    for key in order:
        part = parts[key]
        counts[key] = own[key] + sum(counts[id(inner)] for inner in _all_of(part, schema))
        counts[key] += max((counts[id(inner)] for inner in _one_of(part)), default=0)
        if _refers_elsewhere(part):  # by a name instead of a path: it may be any schema
            counts[key] += total
    if (most := max(counts.values(), default=0)) > MAX_PATTERNS:
        raise ValueError(
            f"{name}one value has to match {most} schemas with patterns or formats; at most {MAX_PATTERNS} are "
            "implemented"
        )


def _own(part: Mapping[str, Any]) -> int:
    """Number of patterns and formats of a schema; those of its properties and items count as one."""
    inner = [value for name in _WITHIN if isinstance(value := part.get(name), dict | list)]
    deeper = any(not _PATTERNS.isdisjoint(each) for each in _mappings(inner))
    return isinstance(part.get("pattern"), str) + isinstance(part.get("format"), str) + deeper


def _all_of(part: Mapping[str, Any], schema: Any) -> list[dict[str, Any]]:
    """The schemas that a value has to match besides `part`."""
    inner = part.get("allOf")
    found = [each for each in inner if isinstance(each, dict)] if isinstance(inner, list) else []
    path = () if part.get("$ref") == "#" else target_path(part)
    target = None if path is None else at_path(schema, path)
    if isinstance(target, dict):
        found.append(target)
    return found


def _one_of(part: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The alternative schemas in `anyOf` and `oneOf`."""
    lists = (part.get(name) for name in ("anyOf", "oneOf"))
    return [each for inner in lists if isinstance(inner, list) for each in inner if isinstance(each, dict)]


def _refers_elsewhere(part: Mapping[str, Any]) -> bool:
    reference = part.get("$ref", part.get("$dynamicRef"))
    return isinstance(reference, str) and not (reference == "#" or reference.startswith("#/"))
