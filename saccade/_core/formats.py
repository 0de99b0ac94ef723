"""`response_format=`: converts a caller's format to the message, and the text of an answer to an object."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from saccade._core.json_nesting import answered_json
from saccade._core.ranges import check_string, check_text
from saccade.errors import InvalidArgument, OutOfRange
from saccade.types import Generation, Lark, Regex, StructuralTags, Tag
from saccade.v1 import types_pb2

ResponseFormat: TypeAlias = "Mapping[str, Any] | type[Any] | Regex | Lark | StructuralTags | Sequence[str] | str"
"""A JSON schema, a Pydantic model class, an expression, a grammar, tags, a list of choices, or "json_object"."""

TRUNCATED = "ANSWER_TRUNCATED"
_EXPECTED = (
    "a JSON schema, a Pydantic model class, saccade.Regex, saccade.Lark, saccade.StructuralTags, a list of choices "
    'or "json_object"'
)
FORMAT_TYPES: dict[str, dict[str, tuple[type, ...]]] = {
    "text": {},
    "json_object": {},
    "json_schema": {"json_schema": (dict,)},
    "regex": {"regex": (str,)},
    "lark": {"lark": (str,)},
    "choice": {"choices": (list,)},
    "structural_tags": {"tags": (list,), "triggers": (list,)},
}
"""OpenAI's types of formats, then those of this project: the value of `type` -> the other keys and their types. None of
them is also a type in JSON schema."""
_OPTIONAL = {"triggers"}
_SCHEMA_KEYS = {"name", "description", "schema", "strict"}
"""OpenAI's keys of `json_schema`; only `schema` has an effect."""


def format_message(value: Any, name: str = "response_format") -> types_pb2.ResponseFormat | None:
    """The message for a format; None for `{"type": "text"}`. Raises InvalidArgument."""
    if value == "json_object":
        return types_pb2.ResponseFormat(json_object=types_pb2.JsonObject())
    if isinstance(value, Regex):
        return types_pb2.ResponseFormat(regex=check_string(f"{name}.pattern", value.pattern))
    if isinstance(value, Lark):
        return types_pb2.ResponseFormat(lark=check_string(f"{name}.grammar", value.grammar))
    if isinstance(value, StructuralTags):
        return types_pb2.ResponseFormat(structural_tags=_tags(value, name))
    if isinstance(value, Mapping):
        if isinstance(value.get("type"), str) and value["type"] in FORMAT_TYPES:
            return _typed(value, name)
        return types_pb2.ResponseFormat(json_schema=json_text(value, name))
    if (schema := _model_schema(value)) is not None:
        return types_pb2.ResponseFormat(json_schema=json_text(schema, name))
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        choices = [check_string(f"{name}[{i}]", choice) for i, choice in enumerate(value)]
        return types_pb2.ResponseFormat(choice=types_pb2.Choice(choices=choices))
    given = repr(value) if isinstance(value, str) else type(value).__name__
    raise InvalidArgument(f"{name}: expected {_EXPECTED}, got {given}")


def parse_text(text: str, value: Any) -> Any:
    """The object that an answer in this format stands for: an instance of a Pydantic model, the value of the JSON, or
    the text. Raises ValueError for text that is not in the format, or nested too deep."""
    if hasattr(value, "model_validate_json"):
        return value.model_validate_json(text)
    if hasattr(value, "validate_json"):
        return value.validate_json(text)
    typed = value.get("type") if isinstance(value, Mapping) else None
    if value == "json_object" or (isinstance(value, Mapping) and typed not in FORMAT_TYPES) or typed in _JSON:
        return answered_json(text)
    return text


_JSON = ("json_object", "json_schema")


def parsed_answer(answer: Generation, value: Any) -> Any:
    """The first sample as an object.

    Raises:
        OutOfRange: the answer was cut off (reason ANSWER_TRUNCATED), so its text may not be in the format.
    """
    if answer.finish_reason != "stop" or isinstance(answer.samples[0].stop_match, str):
        why = "a stop string" if answer.finish_reason == "stop" else answer.finish_reason
        raise OutOfRange(
            f"the answer ended by {why} after {answer.usage.completion_tokens} tokens, before its format was complete",
            reason=TRUNCATED,
            request_id=answer.request_id,
        )
    return parse_text(answer.text, value)


def json_text(value: Mapping[str, Any], name: str) -> str:
    """The JSON of a field's value. Raises InvalidArgument for a value that JSON cannot represent."""
    try:
        return check_text(name, json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"{name}: {error}") from error


def _model_schema(value: Any) -> Mapping[str, Any] | None:
    """The schema of a Pydantic model class or TypeAdapter; None for other values. Its objects allow no further
    properties, since the model would drop them."""
    make = getattr(value, "model_json_schema", None) or getattr(value, "json_schema", None)
    if make is None or isinstance(value, str):
        return None
    try:
        schema = make()
    except TypeError as error:  # the method of an instance, or of another library's class
        raise InvalidArgument(f"response_format: expected {_EXPECTED}, got {type(value).__name__}: {error}") from error
    return schema if not isinstance(schema, dict) else _closed(schema)


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: value if key in _VALUES else _closed(value) for key, value in schema.items()}
    if made.get("type") == "object" and isinstance(made.get("properties"), dict):
        made.setdefault("additionalProperties", False)
    return made


_VALUES = ("enum", "const", "default", "examples")
"""Keywords whose values are data, not schemas."""


def _typed(value: Mapping[str, Any], name: str) -> types_pb2.ResponseFormat | None:
    kind, keys = value["type"], FORMAT_TYPES[value["type"]]
    if extra := sorted(value.keys() - keys.keys() - {"type"}):
        raise InvalidArgument(f"{name}: unknown keys {', '.join(map(str, extra))} for the type {kind!r}")
    for key, kinds in keys.items():
        if not isinstance(value.get(key), kinds) and not (key in _OPTIONAL and key not in value):
            raise InvalidArgument(f"{name}.{key}: expected {kinds[0].__name__}, got {type(value.get(key)).__name__}")
    if kind == "text":
        return None
    if kind == "json_schema":
        holder = value["json_schema"]
        if extra := sorted(map(str, holder.keys() - _SCHEMA_KEYS)):
            raise InvalidArgument(f"{name}.json_schema: unknown keys {', '.join(extra)}")
        if not isinstance(holder.get("schema"), dict | bool):
            raise InvalidArgument(
                f"{name}.json_schema.schema: expected dict, got {type(holder.get('schema')).__name__}"
            )
        return types_pb2.ResponseFormat(json_schema=json_text(holder["schema"], name))
    if kind == "structural_tags":
        tags = [_tag_of(tag, f"{name}.tags[{i}]") for i, tag in enumerate(value["tags"])]
        return format_message(StructuralTags(tags, value.get("triggers", ())), name)
    return format_message(_SIMPLE[kind](value), name)


_SIMPLE: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "json_object": lambda value: "json_object",
    "regex": lambda value: Regex(value["regex"]),
    "lark": lambda value: Lark(value["lark"]),
    "choice": lambda value: value["choices"],
}


def _tag_of(tag: Any, name: str) -> Tag:
    """A tag of a JSON document: `{"begin", "end", one of "json_schema", "regex", "lark"}`."""
    content = [key for key in ("json_schema", "regex", "lark") if isinstance(tag, dict) and key in tag]
    if len(content) != 1 or tag.keys() != {"begin", "end", *content}:
        raise InvalidArgument(f"{name}: expected begin, end and one of json_schema, regex, lark")
    (kind,) = content
    made = tag[kind] if kind == "json_schema" else _SIMPLE[kind](tag)
    return Tag(tag["begin"], made, tag["end"])


def _tags(value: StructuralTags, name: str) -> types_pb2.StructuralTags:
    for what, items in (("triggers", value.triggers), ("tags", value.tags)):
        if not isinstance(items, Sequence) or isinstance(items, str | bytes):
            raise InvalidArgument(f"{name}.{what}: expected a list, got {type(items).__name__}")
    message = types_pb2.StructuralTags(
        triggers=[check_string(f"{name}.triggers[{i}]", trigger) for i, trigger in enumerate(value.triggers)]
    )
    for i, tag in enumerate(value.tags):
        where = f"{name}.tags[{i}]"
        if not isinstance(tag, Tag):
            raise InvalidArgument(f"{where}: expected a saccade.Tag, got {type(tag).__name__}")
        begin, end = check_string(f"{where}.begin", tag.begin), check_string(f"{where}.end", tag.end)
        added = message.tags.add(begin=begin, end=end)
        content = format_message(tag.content, f"{where}.content")
        kind = content.WhichOneof("kind") if content is not None else None
        if content is None or kind not in ("json_schema", "regex", "lark"):
            raise InvalidArgument(f"{where}.content: expected a JSON schema, saccade.Regex or saccade.Lark")
        setattr(added, kind, getattr(content, kind))
    return message
