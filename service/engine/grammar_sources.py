"""Converts text formats to sources for llguidance: Lark, or JSON with several grammars."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from service.common.types import TextFormat
from service.engine.format_parts import BY_NAME
from service.engine.grammar_sizes import check_sizes
from service.engine.schema_numbers import check_numbers
from service.engine.tool_grammars import ToolGrammar, quoted, text_without
from service.engine.types import UnusableConstraint

JSON_OPTIONS: dict[str, Any] = {
    "item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False, "whitespace_pattern": None,
    "coerce_one_of": False, "lenient": False,
}  # fmt: skip
"""JSON has a fixed layout, that of Python's `json.dumps`: otherwise a model could write white space without end, and
hardly any token would be forced. Schema keywords that are not implemented are rejected."""


def grammar_source(format: TextFormat, specials: Mapping[str, int]) -> str:
    """The source for `LLMatcher`. `specials`: ids of the vocabulary's special tokens by name. Raises
    UnusableConstraint."""
    from llguidance import LLMatcher

    try:
        check_sizes(format)
        check_numbers(format)
        match format.kind:
            case "json_schema":
                return json_grammar(format.source)
            case "json_object":
                return json_grammar('{"type": "object"}')
            case "regex":
                return str(LLMatcher.grammar_from_regex(format.source))
            case "choice":
                return _choice(format.source)
            case "structural_tags":
                return _structural_tags(json.loads(format.source), specials)
            case "tool_calls":
                made = ToolGrammar(format.source, lambda text: _literal(text, specials), _content)
                return json.dumps({"grammars": made.grammars()})
    except ValueError as error:
        raise UnusableConstraint(str(error), field_of(format)) from None
    return format.source


def field_of(format: TextFormat) -> str:
    """The field of the request that contains the format."""
    return "chat.tools" if format.kind == "tool_calls" else f"sampling.response_format.{format.kind}"


def json_grammar(schema: str) -> str:
    """The source for a JSON schema. Raises ValueError if it is not JSON or nested too deeply."""
    from llguidance import LLMatcher

    value = json.loads(schema)
    if isinstance(value, bool):
        return json.dumps({"grammars": [{"json_schema": {"x-guidance": JSON_OPTIONS} if value else value}]})
    return str(LLMatcher.grammar_from_json_schema(json.dumps(_without_leap_seconds(value)), overrides=JSON_OPTIONS))


_SECONDS = {"time": "^.{6}[0-5]", "date-time": "^.{17}[0-5]"}
_DATA = ("enum", "const", "default", "examples")
"""Keywords whose values are data, not schemas."""


def _without_leap_seconds(schema: Any) -> Any:
    """The schema with a pattern for each `time` and `date-time` that excludes second 60: the library allows it in any
    minute, and most parsers do not."""
    if isinstance(schema, list):
        return [_without_leap_seconds(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in BY_NAME and isinstance(value, dict):
            made[key] = {name: _without_leap_seconds(part) for name, part in value.items()}
        else:
            made[key] = value if key in _DATA else _without_leap_seconds(value)
    pattern = _SECONDS.get(made["format"]) if isinstance(made.get("format"), str) else None
    if pattern is not None and isinstance(others := made.get("allOf", []), list):  # otherwise the library rejects it
        made["allOf"] = [*others, {"pattern": pattern}]
    return made


def _choice(source: str) -> str:
    return f"start: CHOICE\nCHOICE: {' | '.join(map(quoted, json.loads(source)))}"


def _literal(text: str, specials: Mapping[str, int]) -> str:
    """The Lark source for a fixed text, in which names of special tokens stand for these tokens."""
    names = [name for name in specials if name in text]
    pieces = re.split(f"({'|'.join(map(re.escape, sorted(names, key=len, reverse=True)))})", text) if names else [text]
    return " ".join(f"<[{specials[piece]}]>" if piece in names else quoted(piece) for piece in pieces if piece)


def _structural_tags(tags: dict[str, Any], specials: Mapping[str, int]) -> str:
    """`{"tags": [{"begin", "kind", "content", "end"}], "triggers": [...]}`: free text in which each trigger must be
    followed by the rest of a tag that begins with it."""
    triggers = tags["triggers"] or [tag["begin"] for tag in tags["tags"]]
    grammars: list[dict[str, Any]] = [{"name": "tags", "lark_grammar": ""}]
    names = [f"tag_{i}" for i in range(len(tags["tags"]))]
    lines = [f"start: ({' | '.join(names)})* TEXT"]
    special = set[str]()
    for name, tag in zip(names, tags["tags"], strict=True):
        trigger = max((t for t in triggers if tag["begin"].startswith(t)), key=len, default=None)
        if trigger is None:
            raise ValueError(f"tag {tag['begin']!r} begins with none of the triggers {triggers}")
        trigger = max((name for name in specials if tag["begin"].startswith(name)), key=len, default=trigger)
        rest = [_literal(tag["begin"][len(trigger) :], specials), f"@{name}_content", _literal(tag["end"], specials)]
        if trigger in specials:
            special.add(trigger)  # spelled in other tokens, it would be text that does not begin a tag
            lines.append(f"{name}: TEXT <[{specials[trigger]}]> {' '.join(rest)}")
        else:
            lines.append(f"{name}_trigger[lazy]: TEXT {quoted(trigger)}")
            lines.append(f"{name}: {name}_trigger {' '.join(rest)}")
        grammars.append({"name": f"{name}_content", **_content(tag["kind"], tag["content"])})
    grammars[0]["lark_grammar"] = "\n".join([*lines, text_without(sorted(special))])
    return json.dumps({"grammars": grammars})


def _content(kind: str, source: str) -> dict[str, Any]:
    from llguidance import LLMatcher

    if kind == "lark":
        return {"lark_grammar": source}
    if kind == "choice":
        return {"lark_grammar": _choice(source)}
    if kind == "json_object":
        kind, source = "json_schema", '{"type": "object"}'
    made = json_grammar(source) if kind == "json_schema" else LLMatcher.grammar_from_regex(source)
    (grammar,) = json.loads(made)["grammars"]
    return {key: value for key, value in grammar.items() if key != "name" and value is not None}
