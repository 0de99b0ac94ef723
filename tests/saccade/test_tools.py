"""Tools in requests, histories and results of the client."""

from __future__ import annotations

import json
from typing import Any

import pydantic
import pytest

import saccade
from saccade import errors
from saccade._core.requests import build_request
from saccade._core.results import Assembler
from saccade._core.resuming import StreamState
from saccade._core.retrying import Deadline
from saccade._core.settings import CallSettings
from saccade._jobs.lines import output_line
from saccade.v1 import inference_pb2, types_pb2

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


class City(pydantic.BaseModel):
    city: str


def test_tools_in_all_their_forms() -> None:
    tools: list[Any] = [
        saccade.Tool("a", "does", SCHEMA, strict=True),
        saccade.Tool("b", parameters=City),
        {"type": "function", "function": {"name": "c", "parameters": SCHEMA, "strict": None}},
        {"name": "d", "description": None},
    ]
    request = build_request("?", tools=tools, tool_choice="required", parallel_tool_calls=False)
    assert request.chat.messages[0].parts[0].text == "?", "a string becomes a user's message"
    assert [(tool.name, tool.description, tool.strict) for tool in request.chat.tools] == [
        ("a", "does", True), ("b", "", False), ("c", "", False), ("d", "", False),
    ]  # fmt: skip
    schemas = [tool.parameters_json and json.loads(tool.parameters_json) for tool in request.chat.tools]
    assert schemas == [SCHEMA, City.model_json_schema(), SCHEMA, ""]
    assert request.chat.tool_choice.mode == types_pb2.TOOL_MODE_REQUIRED
    assert request.chat.HasField("parallel_tool_calls") and not request.chat.parallel_tool_calls
    for choice in ("a", {"type": "function", "function": {"name": "a"}}, {"name": "a"}):
        assert build_request("?", tools=tools, tool_choice=choice).chat.tool_choice.name == "a"
    some = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "b"}}, {"name": "c"}]}
    for allowed in ({"type": "allowed_tools", "allowed_tools": some}, {"type": "allowed_tools", **some}):
        chosen = build_request("?", tools=tools, tool_choice=allowed).chat.tool_choice
        assert (chosen.mode, chosen.allowed) == (types_pb2.TOOL_MODE_AUTO, ["b", "c"])
    assert build_request("?", tool_choice="auto").prompt.text == "?", "nothing to choose"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tools": [{"name": ""}]}, r"tools\[0\].name: expected a string"),
        ({"tools": [{"name": "a", "more": 1}]}, r"tools\[0\]: unknown keys more"),
        ({"tools": [3]}, r"tools\[0\]: expected a dict, got int"),
        ({"tools": [{"type": "code"}]}, r"tools\[0\].type: expected function, got 'code'"),
        ({"tools": {"name": "a"}}, "tools: expected a list of tools, got dict"),
        ({"tools": [{"name": "a", "parameters": [1]}]}, "expected a JSON schema or a Pydantic model class, got list"),
        ({"tools": [{"name": "a", "parameters": {"b": {1}}}]}, r"tools\[0\].parameters: .*serializable"),
        ({"tools": [{"name": "a"}], "tool_choice": "b"}, "'b' is neither auto, none, required nor one of the 1 tools"),
        ({"tools": [{"name": "a"}], "raw": True}, "raw prompts and token ids"),
        ({"tools": 5}, "tools: expected a list of tools, got int"),
        ({"tools": [{"name": "a", "strict": "false"}]}, r"tools\[0\].strict: expected True or False, got 'false'"),
        ({"tools": [{"name": "a"}], "parallel_tool_calls": "no"}, "parallel_tool_calls: expected True or False"),
        ({"tools": [{"name": "a"}], "tool_choice": ["a"]}, "tool_choice: expected a string or a dict, got list"),
        ({"tool_choice": "required"}, "tool_choice: required needs one tool or more, got none"),
        ({"tools": [{"name": "a"}], "tool_choice": {"name": 3}}, "expected the name of a function"),
        *(
            ({"tools": [{"name": "a"}], "tool_choice": {"type": "allowed_tools", **choice}}, words)
            for choice, words in (
                ({"allowed_tools": "a"}, "tool_choice.allowed_tools: expected a dict, got str"),
                ({"mode": "none", "tools": [{"name": "a"}]}, "tool_choice.mode: expected auto or required, got 'none'"),
                ({"mode": "auto", "tools": []}, "tool_choice.tools: expected a list of at least one tool"),
                ({"mode": "auto", "tools": [{"name": "a"}, {"name": "b"}]}, r"tools\[1\]: 'b' is none of the 1 tools"),
            )
        ),
    ],
)
def test_wrong_tools_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=words):
        build_request("?", **options)


def test_an_answer_with_calls_continues_the_conversation() -> None:
    calls = [saccade.ToolCall("c1", "a", '{"city": "é"}'), saccade.ToolCall("c2", "b", "{}")]
    sample = saccade.Sample("So.", [1], "tool_calls", saccade.Usage(), tool_calls=calls)
    answer = saccade.Generation("So.", [1], "tool_calls", saccade.Usage(), None, [sample], tool_calls=calls)
    assert [call.parsed() for call in calls] == [{"city": "é"}, {}]
    result = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "ok"}, {"type": "image"}]}
    openai = {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c3", "type": "function", "function": {"name": "a", "arguments": {"x": 1}}}]}  # fmt: skip
    messages: list[Any] = [{"role": "user", "content": "?"}, answer.message, result, openai]
    chat = build_request(messages, images=[b"png"]).chat.messages
    assert [(call.id, call.name, call.arguments) for call in chat[1].tool_calls] == [
        ("c1", "a", '{"city": "é"}'), ("c2", "b", "{}"),
    ]  # fmt: skip
    assert chat[2].tool_call_id == "c1" and chat[2].parts[1].image.data == b"png"
    assert chat[3].tool_calls[0].arguments == '{"x": 1}'
    for wrong in ("x", [{"id": "c", "name": 3}], [3]):
        with pytest.raises(errors.InvalidArgument, match=r"messages\[0\].tool_calls"):
            build_request([{"role": "assistant", "content": "", "tool_calls": wrong}])


def test_arguments_that_are_incomplete_or_nested_too_deep_are_a_value_error() -> None:
    for text in ('{"city": "a', "[]", "", '{"a": ' * 100_000 + "1" + "}" * 100_000):
        with pytest.raises(ValueError):
            saccade.ToolCall("c", "a", text).parsed()


def part(index: int, arguments: str, id: str = "", name: str = "") -> types_pb2.ToolCallDelta:
    return types_pb2.ToolCallDelta(index=index, arguments=arguments, id=id, name=name)


def piece(sample: int, ids: list[int], *parts: types_pb2.ToolCallDelta) -> inference_pb2.StreamGenerateResponse:
    delta = inference_pb2.Delta(index=sample, token_ids=ids, tool_calls=parts)
    return inference_pb2.StreamGenerateResponse(delta=delta)


STARTED = inference_pb2.StreamGenerateResponse(started=inference_pb2.Started(seed=3))


def test_parts_of_calls_are_put_together() -> None:
    made = Assembler(build_request("?", n=2))
    pieces = (
        piece(0, [1], part(0, "{", "c1", "a")), piece(1, [5], part(0, "{}", "d1", "b")),
        piece(0, [2], part(0, "}"), part(1, "{}", "c2", "b")),
    )  # fmt: skip
    for message in (STARTED, *pieces):
        made.take(message)
    for index in range(2):
        reason = types_pb2.FINISH_REASON_TOOL_CALLS
        made.take(inference_pb2.StreamGenerateResponse(
            finished=inference_pb2.Finished(index=index, finish_reason=reason)))  # fmt: skip
    answer = made.finish()
    assert answer.finish_reason == "tool_calls"
    assert [[(c.id, c.name, c.arguments) for c in sample.tool_calls] for sample in answer.samples] == [
        [("c1", "a", "{}"), ("c2", "b", "{}")], [("d1", "b", "{}")],
    ]  # fmt: skip
    assert answer.tool_calls == answer.samples[0].tool_calls and answer.message["tool_calls"] == answer.tool_calls
    line = json.loads(output_line("r", "i", answer))
    message = line["response"]["body"]["choices"][0]["message"]
    assert message["content"] is None and line["response"]["body"]["choices"][0]["finish_reason"] == "tool_calls"
    assert message["tool_calls"][0] == {"id": "c1", "type": "function", "function": {"name": "a", "arguments": "{}"}}


def test_a_repeated_answer_is_cut_where_the_delivered_calls_end() -> None:
    def stream() -> StreamState:
        made = StreamState(build_request("?", n=2), CallSettings(), Deadline(None), resume=True)
        for message in (STARTED, piece(0, [1, 2], part(0, '{"a"', "c1", "f"))):
            made.take(message)
        made.next_request()
        return made

    first = stream()
    assert first.take(piece(0, [1], part(0, "{", "c1", "f"))) is None
    found = first.take(piece(0, [2, 3], part(0, '"a": 1'), part(1, "", "c2", "g")))
    assert found is not None and found.token_ids == [3]
    assert found.tool_calls == [saccade.ToolCallDelta(0, ": 1"), saccade.ToolCallDelta(1, "", "c2", "g")]
    assert first.assembler.tool_calls(0)[0] == saccade.ToolCall("c1", "f", '{"a": 1')
    for other in (part(0, "{", "c9", "f"), part(0, "[", "c1", "f")):
        with pytest.raises(errors.Unavailable, match="differs"):
            stream().take(piece(0, [1], other))
