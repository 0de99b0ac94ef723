"""The values that `response_format=` accepts, and the messages and objects that are made of them."""

from __future__ import annotations

import json
from typing import Any

import pydantic
import pytest

import saccade
from saccade import errors
from saccade._core.formats import format_message, parse_text
from saccade._core.requests import build_request

SCHEMA = {"type": "object", "properties": {"é": {"const": 1}}}
TAGS = saccade.StructuralTags(
    [saccade.Tag("<a>", SCHEMA, "</a>"), saccade.Tag("<b>", saccade.Lark("start: A"), "x")], ["<"]
)


class Inner(pydantic.BaseModel):
    value: int


class Outer(pydantic.BaseModel):
    inner: Inner
    more: dict[str, int] = {}


def message(value: Any) -> Any:
    return build_request("?", response_format=value).sampling.response_format


def test_each_kind_arrives() -> None:
    assert json.loads(message(SCHEMA).json_schema) == SCHEMA and "é" in message(SCHEMA).json_schema
    assert message("json_object").WhichOneof("kind") == "json_object"
    assert message(saccade.Regex("a+")).regex == "a+"
    assert message(saccade.Lark("start: A")).lark == "start: A"
    assert list(message(("a", "b")).choice.choices) == ["a", "b"]
    tags = message(TAGS).structural_tags
    assert list(tags.triggers) == ["<"] and json.loads(tags.tags[0].json_schema) == SCHEMA
    assert (tags.tags[1].begin, tags.tags[1].lark, tags.tags[1].end) == ("<b>", "start: A", "x")


def test_openais_form_and_ours_like_it() -> None:
    named = {"name": "n", "strict": True, "schema": SCHEMA}
    assert message({"type": "json_schema", "json_schema": named}) == message(SCHEMA)
    assert message({"type": "json_object"}) == message("json_object")
    assert message({"type": "regex", "regex": "a"}).regex == "a"
    assert message({"type": "choice", "choices": ["a"]}) == message(["a"])
    parts = [{"begin": "<a>", "json_schema": SCHEMA, "end": "</a>"}, {"begin": "<b>", "lark": "start: A", "end": "x"}]
    assert message({"type": "structural_tags", "tags": parts, "triggers": ["<"]}) == message(TAGS)
    assert not build_request("?", response_format={"type": "text"}).sampling.HasField("response_format")
    # a schema whose type is one of JSON's is a schema
    assert json.loads(message({"type": "integer"}).json_schema) == {"type": "integer"}


def test_a_models_objects_get_no_further_properties() -> None:
    schema = json.loads(message(Outer).json_schema)
    assert schema["additionalProperties"] is False and schema["$defs"]["Inner"]["additionalProperties"] is False
    assert schema["properties"]["more"]["additionalProperties"] == {"type": "integer"}
    assert json.loads(message(pydantic.TypeAdapter(list[int])).json_schema)["type"] == "array"


def test_texts_become_objects() -> None:
    assert parse_text('{"inner": {"value": 3}}', Outer) == Outer(inner=Inner(value=3))
    assert parse_text("[1]", pydantic.TypeAdapter(list[int])) == [1]
    assert parse_text("[1]", {"type": "array"}) == [1]
    for value in ("json_object", {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {}}}):
        assert parse_text("{}", value) == {}
    for value in (saccade.Regex("1"), ["1"], {"type": "regex", "regex": "1"}, TAGS):
        assert parse_text("1", value) == "1"


def test_an_answer_that_is_nested_too_deep_is_a_value_error() -> None:
    assert parse_text("[" * 128 + "]" * 128, "json_object") != []
    for depth in (129, 100_000):
        with pytest.raises(ValueError, match=f"nested {depth} deep; at most 128"):
            parse_text("[" * depth + "]" * depth, "json_object")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("json", "expected a JSON schema.*got 'json'"),
        (3, "got int"),
        (b"a", "got bytes"),
        ([1], r"response_format\[0\]: expected a string, got int"),
        (saccade.Regex(3), "pattern: expected a string"),  # type: ignore[arg-type]
        ({"a": {1, 2}}, "set"),
        ({"a": float("nan")}, "not JSON compliant"),
        ({"type": "regex", "pattern": "a"}, "unknown keys pattern"),
        ({"type": "json_schema"}, "json_schema: expected dict, got NoneType"),
        ({"type": "json_schema", "json_schema": {"name": "n"}}, "schema: expected dict"),
        ({"type": "structural_tags", "tags": [{"begin": "a"}]}, r"tags\[0\]: expected begin, end and one of"),
        (saccade.StructuralTags(5), r"tags: expected a list, got int"),  # type: ignore[arg-type]
        (saccade.StructuralTags([], "a"), r"triggers: expected a list, got str"),
        (saccade.StructuralTags([5]), r"tags\[0\]: expected a saccade.Tag, got int"),  # type: ignore[list-item]
        (saccade.StructuralTags([saccade.Tag("a", ["b"], "c")]), r"tags\[0\].content: expected"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_format_is_named(value: Any, words: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=words):
        format_message(value)
