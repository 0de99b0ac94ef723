"""Tools, calls and results in requests: what is converted, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from google.protobuf import json_format
from tool_texts import MARKUPS, TOOLS, joined, xml

from families.tool_calls import HERMES, CallScanner, ToolMarkup
from families.tool_steps import DEEPEST
from saccade.v1 import inference_pb2
from service.answers import convert
from service.answers.json_values import MAX_NESTING
from service.common import errors
from service.common.types import ChatInput, ToolCall, ToolUse

SCHEMA = '{"type": "object", "properties": {"city": {"type": "string"}}}'
USER = {"role": "ROLE_USER", "parts": [{"text": "a"}]}


def request(**chat: Any) -> inference_pb2.GenerateRequest:
    made = inference_pb2.GenerateRequest()
    return json_format.ParseDict({"chat": {"messages": [USER], **chat}}, made)


def converted(**chat: Any) -> ChatInput:
    value = convert.spec_from_proto(request(**chat)).input
    assert isinstance(value, ChatInput)
    return value


def calling(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "ROLE_ASSISTANT", "toolCalls": list(calls)}


def result(text: str, id: str = "", **more: Any) -> dict[str, Any]:
    return {"role": "ROLE_TOOL", "toolCallId": id, "parts": [{"text": text}], **more}


def call(id: str, name: str = "f", arguments: str = "{}") -> dict[str, Any]:
    return {"id": id, "name": name, "arguments": arguments}


def test_tools_become_an_argument_of_the_template() -> None:
    tools = [{"name": "weather", "description": "of a city", "parametersJson": SCHEMA, "strict": True}, {"name": "now"}]
    value = converted(tools=tools, toolChoice={"name": "now"}, parallelToolCalls=False)
    assert value.needed == ("tools",)
    assert value.template_arguments["tools"] == [
        {"type": "function", "function": {"name": "weather", "description": "of a city",
                                          "parameters": json.loads(SCHEMA)}},
        {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
    ]  # fmt: skip
    use = value.tool_use
    assert use is not None and (use.choice, use.allowed, use.parallel) == ("required", ("now",), False)
    assert [(tool.name, tool.strict) for tool in use.tools] == [("weather", True), ("now", False)]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [({}, "auto"), ({"mode": 0}, "auto"), ({"mode": 1}, "auto"), ({"mode": 2}, "none"), ({"mode": 3}, "required")],
)
def test_the_modes_of_tool_choice(choice: dict[str, Any], expected: str) -> None:
    use = converted(tools=[{"name": "f"}], toolChoice=choice).tool_use
    assert use == ToolUse(use.tools, expected) if use else False  # type: ignore[arg-type]


def test_some_of_the_tools_may_be_called() -> None:
    choice = {"mode": 1, "allowed": ["g"]}
    use = converted(tools=[{"name": "f"}, {"name": "g"}], toolChoice=choice).tool_use
    assert use == ToolUse(use.tools, "auto", ("g",)) if use else False


def test_without_tools_there_is_nothing_to_choose() -> None:
    value = converted(toolChoice={"mode": 2}, parallelToolCalls=True)
    assert value.tool_use is None and "tools" not in value.template_arguments


def test_an_id_may_be_used_again_after_its_result() -> None:
    turns = [calling(call("a", "f")), result("x", "a"), calling(call("a", "g")), result("y", "a"), USER]
    spec = convert.spec_from_proto(request(messages=[USER, *turns]))
    assert isinstance(spec.input, ChatInput)
    assert [message.answered.name for message in spec.input.messages if message.answered] == ["f", "g"]


def test_results_find_their_calls_and_come_in_their_order() -> None:
    image = {"role": "ROLE_TOOL", "toolCallId": "b", "parts": [{"image": {"mediaId": "two"}}]}
    first = {"role": "ROLE_TOOL", "toolCallId": "a", "parts": [{"image": {"mediaId": "one"}}, {"text": "x"}]}
    spec = convert.spec_from_proto(
        request(messages=[USER, calling(call("a", "f", '{"x": 1}'), call("b", "g"), call("", "h")), image, first,
                          result("last"), USER])
    )  # fmt: skip
    assert isinstance(spec.input, ChatInput)
    messages = spec.input.messages
    assert messages[1].tool_calls == (ToolCall("a", "f", {"x": 1}), ToolCall("b", "g", {}), ToolCall("", "h", {}))
    assert [m.answered.name for m in messages if m.answered] == ["f", "g", "h"]
    assert [m.parts for m in messages[2:5]] == [(None, "x"), (None,), ("last",)]
    assert [source.media_id for source in spec.media] == ["one", "two"]
    assert [source.field for source in spec.media] == [
        "chat.messages[3].parts[0].image", "chat.messages[2].parts[0].image",
    ]  # fmt: skip
    assert spec.input.needed == ("tool_calls",)


def refused(field: str, words: str, **chat: Any) -> None:
    with pytest.raises(errors.InvalidArgument, match=words) as error:
        convert.spec_from_proto(request(**chat))
    assert error.value.field == field


@pytest.mark.parametrize(
    ("tools", "field", "words"),
    [
        ([{"name": ""}], "chat.tools[0].name", "has 0 characters.* from 1 to 128"),
        ([{"name": "f"}, {"name": "x" * 129}], "chat.tools[1].name", "has 129 characters.* from 1 to 128"),
        ([{"name": "a>b"}], "chat.tools[0].name", "only letters"),
        ([{"name": "f"}, {"name": "g"}, {"name": "f"}], "chat.tools[2].name", r"also the name of chat.tools\[0\]"),
        ([{"name": f"f{i}"} for i in range(129)], "chat.tools", "has 129 entries; at most 128"),
        ([{"name": "f", "parametersJson": "{"}], "chat.tools[0].parameters_json", "is not valid JSON"),
        ([{"name": "f", "parametersJson": "[]"}], "chat.tools[0].parameters_json", "a JSON object, not a list"),
        ([{"name": "f", "parametersJson": '{"type": "array"}'}], "chat.tools[0].parameters_json", "'array'"),
        ([{"name": "f", "parametersJson": '{"properties": []}'}], "chat.tools[0].parameters_json", "properties"),
        ([{"name": "f", "parametersJson": '{"a": NaN}'}], "chat.tools[0].parameters_json", "NaN"),
        ([{"name": "f", "parametersJson": '{"a": "\\ud800"}'}], "chat.tools[0].parameters_json",
         "half of a surrogate pair"),
        ([{"name": "f", "parametersJson": '{"a": ' + "[" * 100 + "]" * 100 + "}"}], "chat.tools[0].parameters_json",
         "nested 101 deep; at most 100"),
        ([{"name": "f", "description": "x" * 100_000}, {"name": "g", "parametersJson": " " * 40_000}], "chat.tools",
         "has 140000 characters; at most 131072"),
    ],
)  # fmt: skip
def test_malformed_tools_are_refused(tools: list[Any], field: str, words: str) -> None:
    refused(field, words, tools=tools)


@pytest.mark.parametrize(
    ("chat", "field", "words"),
    [
        ({"toolChoice": {"name": "g"}}, "chat.tool_choice.name", "'g', which is none of the 0 tools"),
        ({"toolChoice": {"name": "g"}, "tools": [{"name": "f"}]}, "chat.tool_choice.name", "none of the 1 tools"),
        ({"toolChoice": {"mode": 7}, "tools": [{"name": "f"}]}, "chat.tool_choice.mode", "is 7; it must be"),
        ({"toolChoice": {"mode": 3}}, "chat.tool_choice", "there are no tools"),
        ({"toolChoice": {"mode": 1, "allowed": ["f", "g"]}, "tools": [{"name": "f"}]}, "chat.tool_choice.allowed[1]",
         "'g', which is none of the 1 tools"),
        ({"toolChoice": {"mode": 3, "allowed": ["g"]}}, "chat.tool_choice.allowed[0]", "none of the 0 tools"),
        ({"toolChoice": {"mode": 2, "allowed": ["f"]}, "tools": [{"name": "f"}]}, "chat.tool_choice.allowed",
         "needs the mode auto .* chat.tool_choice.mode is 2"),
        ({"toolChoice": {"name": "f", "allowed": ["f"]}, "tools": [{"name": "f"}]}, "chat.tool_choice.allowed",
         "chat.tool_choice.name is 'f'"),
        ({"tools": [{"name": "f"}], "chatTemplateKwargs": {"tools": []}}, "chat.tools", "chat_template_kwargs"),
    ],
)  # fmt: skip
def test_a_malformed_choice_is_refused(chat: dict[str, Any], field: str, words: str) -> None:
    refused(field, words, **chat)


@pytest.mark.parametrize(
    ("messages", "field", "words"),
    [
        ([result("x")], "chat.messages[0].tool_call_id", "no earlier call without a result"),
        ([calling(call("a")), result("x", "b")], "chat.messages[1].tool_call_id", "1 earlier calls .* has the id 'b'"),
        ([calling(call("a")), result("x", "a"), result("x", "a")], "chat.messages[2].tool_call_id", "0 earlier calls"),
        (
            [calling(call("a")), result("x", "a"), result("x")],
            "chat.messages[2].tool_call_id",
            "no earlier call without a result",
        ),
        (
            [calling(call("a"), call("a"))],
            "chat.messages[0].tool_calls[1].id",
            "which is also the id of an earlier call",
        ),
        (
            [calling(call("a")), calling(call("a"))],
            "chat.messages[1].tool_calls[0].id",
            "which is also the id of an earlier",
        ),
        ([calling(call("x" * 257))], "chat.messages[0].tool_calls[0].id", "257 characters.* from 0 to 256"),
        ([calling(call("a", ""))], "chat.messages[0].tool_calls[0].name", "0 characters.* from 1 to 128"),
        ([calling(call("a", "f", '{"x'))], "chat.messages[0].tool_calls[0].arguments", "is not valid JSON"),
        ([calling(call("a", "f", "3"))], "chat.messages[0].tool_calls[0].arguments", "must be a JSON object"),
        (
            [calling(*[call(str(i)) for i in range(1025)])],
            "chat.messages[0].tool_calls",
            "has 1025 entries; at most 1024",
        ),
        ([calling(call("a", "f", '{"x": NaN}'))], "chat.messages[0].tool_calls[0].arguments", "NaN"),
        (
            [{**USER, "toolCalls": [call("a")]}],
            "chat.messages[0].tool_calls",
            "tool_calls is set, but the role is not assistant",
        ),
        ([{**USER, "toolCallId": "a"}], "chat.messages[0].tool_call_id", "the role is not tool"),
    ],
)
def test_a_history_that_does_not_fit_together_is_refused(messages: list[Any], field: str, words: str) -> None:
    refused(field, words, messages=messages)


ARGUMENTS = [
    ('{"city": "a", "options": {"b": -1e400}}', {"city": "a", "options": {"b": "-1e400"}}),
    (r'{"options": {"a\udfff": "\ud83d\ude00 \ud800", "b": "\\ud800"}}',
     {"options": {"a\ufffd": "\U0001f600 \ufffd", "b": r"\ud800"}}),
    ('{"options": ' + '{"a": ' * 97 + "[]" + "}" * 97 + "}", None),
    ('{"city": "' + "x" * 200_000 + '"}', None),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "expected"), ARGUMENTS, ids=["number", "surrogate", "nesting", "length"])
@pytest.mark.parametrize("markup", MARKUPS, ids=lambda markup: markup.body)
def test_what_a_model_writes_is_accepted_in_the_history(
    markup: ToolMarkup, arguments: str, expected: dict[str, Any] | None
) -> None:
    keys, inner = json.loads(arguments), arguments[arguments.find("{", 1) : -1]
    if markup.body == "xml":
        text = xml("weather", **{key: value if isinstance(value, str) else inner for key, value in keys.items()})
    elif markup.body in ("python", "lines"):
        told = [f"{key}={json.dumps(value) if isinstance(value, str) else inner}" for key, value in keys.items()]
        text = f"{markup.begin}weather({', '.join(told)}){markup.end}"
    else:
        item = f'{{"name": "weather", "arguments": {arguments}}}'
        text = markup.begin + (f"[{item}]" if markup.body == "list" else item) + markup.end
    scanner = CallScanner(markup, TOOLS)
    rest, (written,) = joined(scanner.feed(text) + scanner.finish())
    (message,) = converted(messages=[calling(call("a", *written))]).messages
    assert rest == "" and message.tool_calls[0].arguments == (expected or json.loads(arguments))


def test_a_value_that_no_history_may_have_ends_the_call() -> None:
    assert DEEPEST + 1 == MAX_NESTING, "a value is within the object of the arguments"
    deep = '{"a": ' * 99 + "[]" + "}" * 99
    scanner = CallScanner(HERMES, TOOLS)
    text, _ = joined(
        scanner.feed(f'<tool_call>{{"name": "weather", "arguments": {deep}}}</tool_call>') + scanner.finish()
    )
    assert scanner.pending and text.startswith("[]}}")
