"""Calls that keep to the tools' schemas, with the vocabulary of the embedded model and random choices."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from grammar_walks import END, allowed, walk

from families.tool_calls import CALL_LIST, HERMES, PYTHON_LINES, PYTHON_LIST, XML, CallScanner, TextPiece, ToolMarkup
from service.answers.tool_calls import calls_format
from service.common.types import ConstraintSpec, TextFormat, Tool, ToolUse
from service.engine.constraining import Constraining
from service.engine.types import UnusableConstraint
from service.model.tokenizer import Tokenizer

MARKUPS = [XML, HERMES, CALL_LIST, PYTHON_LIST, PYTHON_LINES]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 2, "maxLength": 9, "description": "a </parameter> city"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["C", "F\n"]},
        "note": {"anyOf": [{"type": "string", "pattern": "^[a-c]+$"}, {"type": "null"}]},
        "when": {"type": "string", "format": "date"},
        "like": {"type": "string", "pattern": "x/\\d"},
        "where": {"$ref": "#/$defs/place"},
        "on": {"type": ["boolean", "null"]},
        "level": {"const": 3},
        "kind": {"enum": ["a", 1, None]},
        "size": {"type": ["string", "null"], "enum": ["S", "L"]},
        "port": {"type": ["integer", "string"], "enum": ["any", 80.0, 1.5, None, "None"]},
        "axis": {"oneOf": [{"const": "x"}, {"enum": ["y", "z"]}]},
    },
    "required": ["city", "days", "where"],
    "additionalProperties": False,
    "$defs": {
        "place": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"],
                  "additionalProperties": False},
    },
}  # fmt: skip
TOOLS = (Tool("weather", "", SCHEMA), Tool("now"), Tool("free", "", {"properties": {"a": {}}, "required": ["a"]}))


def begun(constraining: Constraining, markup: ToolMarkup, use: ToolUse) -> Any:
    spec = ConstraintSpec(calls_format(markup, use))
    return constraining.begin(spec, frozenset({END}), frozenset(), ()).result(timeout=60)


def parsed(markup: ToolMarkup, tools: tuple[Tool, ...], text: str) -> tuple[str, list[tuple[str, Any]]]:
    """Text and calls; all of them are complete."""
    scanner = CallScanner(markup, {tool.name: tool.parameters for tool in tools})
    calls: dict[int, list[str]] = {}
    rest = ""
    for piece in scanner.feed(text) + scanner.finish():
        if isinstance(piece, TextPiece):
            rest += piece.text
        else:
            call = calls.setdefault(piece.index, [piece.name, ""])
            call[1] += piece.arguments
    assert not scanner.pending, text
    return rest, [(name, json.loads(arguments)) for name, arguments in calls.values()]


@pytest.mark.parametrize("markup", MARKUPS, ids=lambda markup: markup.body)
def test_required_calls_parse_and_validate(
    markup: ToolMarkup, constraining: Constraining, tokenizer: Tokenizer
) -> None:
    rng, ended, several = random.Random(markup.body), 0, 0
    for names, parallel in (((), True), ((), False), (("weather", "now"), True)):
        tools = {tool.name: tool for tool in TOOLS}
        first = begun(constraining, markup, ToolUse(TOOLS, "required", names, parallel))
        for _ in range(12):
            drawn = walk(first.copy(), rng, most=900, end=0.6, prefer=tokenizer.encode('}"])\n</parameter></function>'))
            if drawn[-1] != END:
                continue
            rest, calls = parsed(markup, TOOLS, tokenizer.decode(drawn))
            assert rest == "" and calls and (parallel or len(calls) == 1)
            several += len(calls) > 1
            for called, arguments in calls:
                assert not names or called in names
                jsonschema.validate(arguments, {"type": "object", **tools[called].parameters},
                                    format_checker=jsonschema.FormatChecker())  # fmt: skip
            ended += 1
    assert ended >= 12 and several


@pytest.mark.parametrize("markup", MARKUPS, ids=lambda markup: markup.body)
def test_strict_tools_are_held_to_their_schemas_when_they_are_called(
    markup: ToolMarkup, constraining: Constraining, tokenizer: Tokenizer
) -> None:
    tools = (Tool("strict", "", {"properties": {"n": {"const": 7}}, "required": ["n"]}, strict=True), Tool("loose"))
    first = begun(constraining, markup, ToolUse(tools))
    before = {"list": "[", "python": "[", "lines": ""}.get(markup.body, "\n")

    def written(name: str, key: str, value: str) -> str:
        if markup.body == "xml":
            inner = f"<function={name}>\n<parameter={key}>\n{value}\n</parameter>\n</function>"
        elif markup.body in ("python", "lines"):
            inner = f"{name}({key}={value})"
        else:
            inner = json.dumps({"name": name, "arguments": {key: json.loads(value)}})
        return f"so {markup.begin}{before}{inner}"

    for name, key, value, fine in (
        ("strict", "n", "7", True), ("strict", "n", "8", False), ("strict", "m", "7", False),
        ("loose", "m", "8", True), ("other", "m", "8", False),
    ):  # fmt: skip
        tokens = tokenizer.encode(written(name, key, value))
        assert (first.valid_prefix(tokens) == len(tokens)) == fine, (name, key, value)
    plain = [*tokenizer.encode("no call, only < and <tool> and <TOOL"), END]
    assert first.valid_prefix(plain) == len(plain)
    made = first.copy()
    for token in tokenizer.encode(f"a{markup.begin}"):
        made.accept(token)
    assert END not in allowed(made), "a call has begun"
    one = begun(constraining, markup, ToolUse(tools, allowed=("loose",)))
    assert one.valid_prefix(plain) == len(plain)
    for name, fine in (("strict", False), ("loose", True)):
        tokens = tokenizer.encode(written(name, "n", "7"))
        assert (one.valid_prefix(tokens) == len(tokens)) == fine, name


@pytest.mark.parametrize("markup", MARKUPS, ids=lambda markup: markup.body)
@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (TextFormat("json_schema", '{"const": 3}'), "3"), (TextFormat("json_object"), '{"a": 1}'),
        (TextFormat("choice", '["a", "b"]'), "b"), (TextFormat("regex", "[xy]+"), "xy"),
        (TextFormat("lark", 'start: "p" q\nq: "q"'), "pq"),
    ],
    ids=lambda value: value.kind if isinstance(value, TextFormat) else "",
)  # fmt: skip
def test_an_answer_has_calls_or_its_format(
    markup: ToolMarkup, answer: TextFormat, text: str, constraining: Constraining, tokenizer: Tokenizer
) -> None:
    inner = '{"name": "now", "arguments": {}}'
    body = {
        "xml": "\n<function=now>\n</function>\n", "object": f"\n{inner}\n", "list": f"[{inner}]", "python": "[now()]",
        "lines": "now()",
    }[markup.body]  # fmt: skip
    call = f"{markup.begin}{body}{markup.end}"
    for choice in ("auto", "required"):
        spec = ConstraintSpec(calls_format(markup, ToolUse((Tool("now"),), choice), answer))
        first = constraining.begin(spec, frozenset({END}), frozenset(), ()).result(timeout=60)
        free = choice == "auto"
        for output, fine in ((text, free), (call, True), (f"z{call}", False), (f"{call}{text}", False), ("z", False)):
            tokens = [*tokenizer.encode(output), END]
            assert (first.valid_prefix(tokens) == len(tokens)) == fine, (choice, output)


@pytest.mark.parametrize("markup", [PYTHON_LIST, PYTHON_LINES], ids=lambda markup: markup.body)
def test_keyword_arguments_are_in_order_with_commas_between(
    markup: ToolMarkup, constraining: Constraining, tokenizer: Tokenizer
) -> None:
    flag, number = {"type": "boolean", "description": "yes or no"}, {"type": "integer"}
    some = {"properties": {"a": number, "from": flag, "b-c": {"type": ["string", "integer"]}, "d": number}}
    tools = Tool("some", "", {**some, "required": ["from"]}), Tool("free", "", some)
    first = begun(constraining, markup, ToolUse(tools, "required"))
    lines = markup.body == "lines"
    yes, between = ("true", "\n") if lines else ("True", ", ")
    for call, fine in (
        (f"some(from={yes})", True), (f"some(a=1, from={yes})", True), (f"some(from={yes}, b-c=\"x\", d=2)", True),
        (f"some(a=1, from={yes}, b-c=5, d=2)", True), ("free()", True), ("free(d=2)", True), ("free(a=1, d=2)", True),
        (f"free(){between}some(from={yes})", True), ("some()", False), ("some(a=1)", False), ("free(, d=2)", False),
        (f"some(from={yes}, a=1)", False), (f"some(from={yes},)", False), ("free(a=1 d=2)", False),
        ("free(a=1, a=1)", False), ("free(e=1)", False), (f"some(from={'True' if lines else 'true'})", False),
    ):  # fmt: skip
        text = f"{markup.begin}{call if lines else f'[{call}]'}{markup.end}"
        tokens = [*tokenizer.encode(text), END]
        assert (first.valid_prefix(tokens) == len(tokens)) == fine, call
        if fine:
            assert parsed(markup, tools, text)[0] == ""


def test_a_fault_in_a_format_is_found_although_only_calls_are_allowed(constraining: Constraining) -> None:
    spec = ConstraintSpec(
        calls_format(XML, ToolUse((Tool("now"),), "required"), TextFormat("json_schema", '{"type": "strnig"}'))
    )
    with pytest.raises(UnusableConstraint, match="response_format: Invalid type: strnig"):
        constraining.begin(spec, frozenset({END}), frozenset(), ()).result(timeout=60)


def refused(constraining: Constraining, markup: ToolMarkup, schema: Any) -> str:
    with pytest.raises(UnusableConstraint) as error:
        begun(constraining, markup, ToolUse((Tool("f", "", schema),), "required"))
    assert error.value.field == "chat.tools"
    return str(error.value.message)


@pytest.mark.parametrize(
    ("inner", "words"),
    [
        ({"type": "string", "format": "regex"}, "format 'regex' is not implemented"),
        ({"type": "string", "maxLength": 2001}, "maxLength is 2001; at most 2000"),
        ({"type": ["string", "integer"]}, "look alike"),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "union of strings"),
        ({"type": "string", "contentEncoding": "base64"}, "'contentEncoding' is not implemented"),
        ({"type": "string", "pattern": "^a|b$"}, "anchors in a pattern with alternatives"),
        ({"$ref": "#/$defs/none"}, "'#/$defs/none' is not in the schema"),
        ({"$ref": "#/$defs/loop"}, "more than 16 references in a row"),
        ({"type": "integer", "x-guidance": {}}, "this schema is not implemented in this markup"),
        ({"enum": ["0", 1.5, None]}, "'0' would be read as 0, which is none"),
        ({"type": ["string", "null"], "enum": ["a", "null"]}, "'null' would be read as null, which is none"),
        ({"enum": ["ab", 1], "maxLength": 1}, "enum with further keywords"),
        ({"type": "string", "enum": ["a"], "const": "b"}, "enum with further keywords"),
        ({"type": "integer", "enum": ["1", "2"]}, "Unsatisfiable"),
        ({"oneOf": [{"type": "string", "pattern": "a"}, {"type": "string", "pattern": "b"}]}, "may overlap"),
        ({"oneOf": [{"enum": ["a", "b"]}, {"const": "b"}]}, "may overlap"),
        ({"oneOf": [{"const": "a"}], "anyOf": [{"const": "b"}]}, "union of strings"),
        ({"enum": []}, "cannot be|union|none of its|nsatisfiable|enum"),
        (3, "this schema is not implemented in this markup"),
        ({"type": 5}, "parameter 'a': type must be a string or a list of strings"),
        ({"type": ["string", {}]}, "type must be a string or a list of strings"),
        ({"anyOf": [{"enum": 5}]}, "enum must be a list"),
        ({"type": "string", "format": ["date"]}, "format must be a string"),
        ({"type": "string", "minLength": "5"}, "minLength must be a whole number from 0 on"),
        ({"type": "string", "maxLength": 5.5}, "maxLength must be a whole number from 0 on"),
        ({"type": "string", "maxLength": True}, "maxLength must be a whole number from 0 on"),
        ({"type": "string", "minLength": -1}, "minLength must be a whole number from 0 on"),
        ({"type": "string", "minLength": 2001}, "minLength is 2001; at most 2000"),
    ],
)  # fmt: skip
def test_what_the_markup_cannot_express_is_refused(inner: Any, words: str, constraining: Constraining) -> None:
    schema = {"properties": {"a": inner}, "$defs": {"loop": {"$ref": "#/$defs/loop"}}}
    message = refused(constraining, XML, schema)
    assert any(word in message for word in words.split("|")), message


def test_keywords_of_the_whole_object_are_refused_by_name(constraining: Constraining) -> None:
    assert "'minProperties' is not implemented" in refused(constraining, XML, {"minProperties": 1})
    assert "'b' is required, but is none of the 1 properties" in refused(
        constraining, XML, {"properties": {"a": {}}, "required": ["b"]}
    )
    for required in (5, None, [["a"]]):
        assert "'f': required must be a list of strings" in refused(constraining, XML, {"required": required})
    assert "x-guidance" in refused(constraining, HERMES, {"x-guidance": {}})
    assert "cannot be named 'a>'" in refused(constraining, XML, {"properties": {"a>": {}}})
    assert "'minProperties' is not implemented" in refused(constraining, PYTHON_LIST, {"minProperties": 1})
    for key in ("a b", "a=", "", "x" * 257):
        named = refused(constraining, PYTHON_LINES, {"properties": {key: {}}})
        assert f"cannot be named {key[:50]!r}" in named
    for inner in (False, {"x-guidance": {}}):
        assert "'f', parameter 'a': this schema" in refused(constraining, PYTHON_LIST, {"properties": {"a": inner}})


def test_a_fault_in_a_schema_is_found_by_tool_and_place(constraining: Constraining) -> None:
    good, bad = {"properties": {"a": {"type": "string"}}}, {"properties": {"a": {"items": {"type": "strnig"}}}}
    tools = (Tool("one", "", good, strict=True), Tool("two", "", bad, strict=True))
    with pytest.raises(UnusableConstraint) as error:
        begun(constraining, HERMES, ToolUse(tools, "required"))
    assert str(error.value) == "tools: tool 'two': Invalid type: strnig, at /properties/a/items/type"


@pytest.mark.parametrize("markup", MARKUPS, ids=lambda markup: markup.body)
def test_numbers_that_cannot_be_kept_to_are_refused_by_tool_and_place(
    markup: ToolMarkup, constraining: Constraining
) -> None:
    message = refused(constraining, markup, {"properties": {"id": {"const": 2**53 + 1}}})
    assert message.startswith("tool 'f': 9007199254740993 would be rounded") and message.endswith(
        "/properties/id/const"
    )
    steps = (Tool("one", "", {"properties": {"a": {"multipleOf": 499}}}, strict=True), Tool("two"))
    answer = TextFormat("json_schema", '{"items": {"multipleOf": 503}}')
    spec = ConstraintSpec(calls_format(markup, ToolUse(steps), answer))
    with pytest.raises(UnusableConstraint, match="response_format: multipleOf is 503.* 250997.*/items/multipleOf"):
        constraining.begin(spec, frozenset({END}), frozenset(), ()).result(timeout=60)
