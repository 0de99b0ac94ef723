"""Converts the constraints of a request from messages to `ConstraintSpec`. Cheap checks are made here, before anything
is allocated; the engine makes the others when it compiles the format."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from saccade.v1 import types_pb2
from service.answers.bounds import check_length
from service.answers.json_values import json_value
from service.common import errors
from service.common.types import ConstraintSpec, TextFormat

MAX_FORMAT = 2**17
"""Largest number of characters of all parts of a format together."""
MAX_CHOICES = 4096
MAX_TAGS = 256
MAX_BAD_WORDS = 256
MAX_BAD_WORD_LENGTH = 256
_FORMAT = "sampling.response_format"


def constraint_from_proto(sampling: types_pb2.SamplingParams) -> ConstraintSpec | None:
    """The request's constraint; None if the answer may be any text. Raises InvalidArgument."""
    text_format = _format(sampling.response_format) if sampling.HasField("response_format") else None
    if text_format is not None and sampling.ignore_eos:
        raise errors.InvalidArgument(
            "ignore_eos and response_format cannot be combined: the format determines where the text ends",
            field="sampling.ignore_eos",
        )
    for i, word in enumerate(sampling.bad_words):
        check_length(f"sampling.bad_words[{i}]", word, MAX_BAD_WORD_LENGTH)
    _check_count("sampling.bad_words", len(sampling.bad_words), MAX_BAD_WORDS)
    allowed = frozenset(sampling.allowed_token_ids) or None
    if text_format is None and allowed is None and not sampling.bad_words:
        return None
    return ConstraintSpec(text_format, allowed, tuple(sampling.bad_words))


def _format(message: types_pb2.ResponseFormat) -> TextFormat:
    kind = message.WhichOneof("kind")
    match kind:
        case "json_schema":
            _check_schema(f"{_FORMAT}.json_schema", message.json_schema)
            return TextFormat("json_schema", message.json_schema)
        case "json_object":
            return TextFormat("json_object")
        case "regex":
            check_length(f"{_FORMAT}.regex", message.regex, MAX_FORMAT)
            return TextFormat("regex", message.regex)
        case "lark":
            check_length(f"{_FORMAT}.lark", message.lark, MAX_FORMAT)
            return TextFormat("lark", message.lark)
        case "choice":
            return _choice(message.choice)
        case "structural_tags":
            return _tags(message.structural_tags)
    raise errors.InvalidArgument(f"{_FORMAT} is empty", field=_FORMAT)


def _choice(message: types_pb2.Choice) -> TextFormat:
    field = f"{_FORMAT}.choice"
    choices = list(message.choices)
    _check_count(field, len(choices), MAX_CHOICES, least=1)
    _check_total(field, choices)
    if "" in choices:
        raise errors.InvalidArgument(f"{field}.choices[{choices.index('')}] is empty", field=field)
    return TextFormat("choice", json.dumps(choices))


def _tags(message: types_pb2.StructuralTags) -> TextFormat:
    field = f"{_FORMAT}.structural_tags"
    triggers = list(message.triggers)
    _check_count(f"{field}.tags", len(message.tags), MAX_TAGS, least=1)
    _check_count(f"{field}.triggers", len(triggers), MAX_TAGS)
    tags = [_tag(tag, f"{field}.tags[{i}]", triggers) for i, tag in enumerate(message.tags)]
    _check_total(field, [*triggers, *(text for tag in tags for text in tag.values())])
    if "" in triggers:
        raise errors.InvalidArgument(f"{field}.triggers[{triggers.index('')}] is empty", field=field)
    return TextFormat("structural_tags", json.dumps({"tags": tags, "triggers": triggers}))


def _tag(tag: types_pb2.StructuralTag, field: str, triggers: list[str]) -> Mapping[str, str]:
    kind = tag.WhichOneof("content")
    if kind is None:
        raise errors.InvalidArgument(f"{field} must have one of json_schema, regex, lark", field=field)
    if not tag.begin:
        raise errors.InvalidArgument(f"{field}.begin is empty", field=f"{field}.begin")
    if triggers and not any(tag.begin.startswith(trigger) for trigger in triggers):
        raise errors.InvalidArgument(
            f"{field}.begin is {tag.begin[:100]!r}, which starts with none of the triggers", field=f"{field}.begin"
        )
    content: str = getattr(tag, kind)
    if kind == "json_schema":
        _check_schema(f"{field}.json_schema", content)
    else:
        check_length(f"{field}.{kind}", content, MAX_FORMAT)
    return {"begin": tag.begin, "kind": kind, "content": content, "end": tag.end}


def _check_schema(field: str, text: str) -> None:
    schema = json_value(field, text, MAX_FORMAT)
    if not isinstance(schema, dict | bool):
        raise errors.InvalidArgument(f"{field} must be a JSON object, not a {type(schema).__name__}", field=field)
    if isinstance(schema, dict) and "x-guidance" in schema:
        raise errors.InvalidArgument(f"{field}: the key x-guidance is not allowed", field=field)


def _check_total(field: str, texts: Iterable[str]) -> None:
    if (total := sum(map(len, texts))) > MAX_FORMAT:
        raise errors.InvalidArgument(f"{field} has {total} characters; at most {MAX_FORMAT} are allowed", field=field)


def _check_count(field: str, count: int, most: int, *, least: int = 0) -> None:
    if not least <= count <= most:
        raise errors.InvalidArgument(f"{field} has {count} entries; it must have from {least} to {most}", field=field)
