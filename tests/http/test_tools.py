"""Tool calls over HTTP, by OpenAI's and Anthropic's own clients: chat completions, responses, messages."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, Literal

import anthropic
import httpx
import jsonschema
import openai
import pytest
from calling import SCHEMA, make_calling
from running import RunningServer
from running_http import RunningHttp
from scripted import Scripted

import saccade
from saccade._openai.response_schema import ResponseRequest, chat_of
from saccade.types import Delta, Generation, Sample, ToolCallDelta, Usage
from saccade.v1 import inference_pb2
from service.engine.types import EventSink
from service.http.messages import MessageEvents
from service.http.responses import ResponseEvents
from service.http.streams import Events
from service.model.tokenizer import Tokenizer

ASK: list[Any] = [{"role": "user", "content": "?"}]
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": SCHEMA}}]
LONG = {
    **SCHEMA,
    "properties": {**SCHEMA["properties"], "notes": {"type": "string", "pattern": "^[a-z ]{200}$"}},
    "required": [*SCHEMA["required"], "notes"],
}  # fmt: skip
"""Arguments that take many steps to write: those of a few steps may come together."""
LONG_TOOLS: Any = [{"type": "function", "function": {**TOOLS[0]["function"], "parameters": LONG}}]
FIXED: dict[str, Any] = {"temperature": 1.0, "parallel_tool_calls": False}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    model: Path = make_calling(tmp_path_factory.mktemp("calling") / "tiny")
    with RunningServer(str(model), dtype="float32", threads=1, max_seqs=4, max_len=900) as running:
        yield running


@pytest.fixture(scope="module")
def client(http: RunningHttp) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{http.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_chat_completions_call_tools_as_grpc_does(client: openai.OpenAI, grpc_client: saccade.Client) -> None:
    fixed: dict[str, Any] = {"model": "", "messages": ASK, "max_tokens": 500, "seed": 3, "tools": LONG_TOOLS, **FIXED}
    same = grpc_client.generate(
        ASK,
        tools=LONG_TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=500,
        seed=3,
        temperature=1.0,
    )
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        (sample,) = client.chat.completions.create(**fixed, tool_choice=choice).choices
        assert sample.finish_reason == "tool_calls" and not sample.message.content
        (call,) = sample.message.tool_calls
        jsonschema.validate(json.loads(call.function.arguments), LONG)
        assert (call.function.name, call.function.arguments) == ("weather", same.tool_calls[0].arguments)
        with client.chat.completions.stream(**fixed, tool_choice=choice) as stream:
            deltas = [e for e in stream if e.type == "tool_calls.function.arguments.delta"]
            streamed = stream.get_final_completion().choices[0].message
        assert len(deltas) > 1, "arguments come as they are written"
        assert streamed.tool_calls and streamed.tool_calls[0].function.arguments == call.function.arguments
    assert not client.chat.completions.create(**fixed, tool_choice="none").choices[0].message.tool_calls
    with pytest.raises(openai.BadRequestError, match="snow"):
        client.chat.completions.create(**fixed, tool_choice={"type": "function", "function": {"name": "snow"}})


def test_only_some_of_the_tools_may_be_called(client: openai.OpenAI) -> None:
    """All of them are in the prompt, so that its cached parts can be used."""
    now: Any = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    fixed: dict[str, Any] = {"model": "", "messages": ASK, "max_tokens": 60, "tools": [*TOOLS, now], **FIXED}
    allowed: Any = {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}
    made = client.chat.completions.create(**fixed, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    (call,) = made.choices[0].message.tool_calls or ()
    assert isinstance(call, openai.types.chat.ChatCompletionMessageFunctionToolCall) and call.function.name == "now"
    auto: Any = {"type": "allowed_tools", "allowed_tools": {**allowed, "mode": "auto"}}
    free = [client.chat.completions.create(**fixed, tool_choice=choice).usage for choice in (auto, "auto")]
    assert {usage and usage.prompt_tokens for usage in free} == {made.usage and made.usage.prompt_tokens}

    choice: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]}
    tools: Any = [{"type": "function", **tool["function"]} for tool in fixed["tools"]]
    response = client.responses.create(model="", input="?", tools=tools, tool_choice=choice, **FIXED)
    assert [item.name for item in response.output if item.type == "function_call"] == ["now"]
    assert response.tool_choice.model_dump() == choice if not isinstance(response.tool_choice, str) else False

    allowed["tools"][0]["function"]["name"] = choice["tools"][0]["name"] = "snow"
    with pytest.raises(openai.BadRequestError, match="'snow', which is none of the 2 tools") as error:
        client.chat.completions.create(**fixed, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert error.value.param == "tool_choice.allowed_tools.tools[0].function.name"
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(model="", input="?", tools=tools, tool_choice=choice)
    assert error.value.param == "tool_choice.tools[0].name"
    allowed["tools"], choice["tools"] = allowed["tools"] * 129, choice["tools"] * 129
    with pytest.raises(openai.BadRequestError, match="- tool_choice.allowed_tools.tools has 129 entries") as error:
        client.chat.completions.create(**fixed, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert error.value.param == "tool_choice.allowed_tools.tools"
    with pytest.raises(openai.BadRequestError, match="- tool_choice.tools has 129 entries") as error:
        client.responses.create(model="", input="?", tools=tools, tool_choice=choice)
    assert error.value.param == "tool_choice.tools"
    with pytest.raises(openai.BadRequestError, match="- tool_choice.mode: input should be") as error:
        client.responses.create(model="", input="?", tools=tools, tool_choice={**choice, "mode": "none"})
    assert error.value.param == "tool_choice.mode"
    with pytest.raises(openai.BadRequestError, match="allowed_tools.tools"):
        nothing: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}
        client.chat.completions.create(**fixed, tool_choice=nothing)


def test_results_are_in_the_prompt_of_the_next_turn(client: openai.OpenAI) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    turns: list[Any] = [
        *ASK, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]  # fmt: skip
    sizes = []
    for messages in (turns[:1], turns[:2], turns):
        usage = client.chat.completions.create(model="", messages=messages, tools=TOOLS, max_tokens=1).usage
        assert usage is not None
        sizes.append(usage.prompt_tokens)
    assert sizes[0] < sizes[1] < sizes[2]
    path, body = "/../tokenize", {"messages": turns, "tools": TOOLS, "tool_choice": "auto"}
    assert client.post(path, cast_to=dict[str, Any], body=body)["count"] == sizes[-1]
    for wrong in (
        {"tools": TOOLS}, {"tool_choice": "auto"}, {"enable_thinking": True}, {"late_system_as_user": True},
        {"chat_template_kwargs": {"a": 1}}, {"enable_thinking": False}, {"parallel_tool_calls": False},
    ):  # fmt: skip
        with pytest.raises(openai.BadRequestError, match=f"{[*wrong][0]}: needs messages"):
            client.post(path, cast_to=object, body={"prompt": "?", **wrong})
    usual = {"add_generation_prompt": True, "continue_final_message": False, "late_system_as_user": False}
    assert client.post(path, cast_to=dict[str, Any], body={"prompt": "?", **usual})["count"] == 1
    with pytest.raises(openai.BadRequestError, match="c2"):
        stray: Any = [*ASK, {"role": "tool", "tool_call_id": "c2", "content": "sunny"}]
        client.chat.completions.create(model="", messages=stray, tools=TOOLS, max_tokens=1)


def test_responses_call_tools(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}]
    fixed: dict[str, Any] = {"model": "", "input": "?", "tools": tools, "tool_choice": "required", **FIXED}
    calls = [item for item in client.responses.create(**fixed).output if item.type == "function_call"]
    assert [call.name for call in calls] == ["weather"]
    jsonschema.validate(json.loads(calls[0].arguments), SCHEMA)
    with client.responses.stream(**fixed) as stream:
        parts = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        (call,) = [item for item in stream.get_final_response().output if item.type == "function_call"]
    assert "".join(parts) == call.arguments
    jsonschema.validate(json.loads(call.arguments), SCHEMA)


def test_calls_that_only_the_model_makes_are_those_of_any_response(client: openai.OpenAI) -> None:
    """OpenAI's defaults for tools and items, spelled out."""
    called: Any = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"}
    told: Any = {"type": "function_call_output", "call_id": "c1", "output": "warm"}
    tool: Any = {"type": "function", "name": "weather", "parameters": SCHEMA}
    caller, defaults = {"caller": {"type": "direct"}}, {"defer_loading": False, "allowed_callers": ["direct"]}
    plain, spelled = (
        client.responses.create(
            model="", input=[{"role": "user", "content": "?"}, called | by, told | by], tools=[tool | more],
            max_output_tokens=16, temperature=0,
        )
        for by, more in (({}, {}), (caller, defaults))
    )  # fmt: skip
    assert spelled.usage and plain.usage and spelled.usage.input_tokens == plain.usage.input_tokens
    assert spelled.output_text == plain.output_text
    for other, name in ({"defer_loading": True}, "defer_loading"), ({"allowed_callers": ["programmatic"]}, "callers"):
        with pytest.raises(openai.BadRequestError, match=name):
            client.responses.create(model="", input="?", tools=[tool | other])


def test_functions_of_a_namespace(client: openai.OpenAI) -> None:
    """Codex sends some of its functions so. Calls name the namespace and the function apart."""
    function: Any = {"type": "function", "name": "weather", "description": "of a city", "parameters": SCHEMA}
    group: Any = {"type": "namespace", "name": "sky", "description": "Facts about the sky.", "tools": [function]}
    fixed: dict[str, Any] = {"model": "", "input": "?", "tools": [group], "tool_choice": "required", **FIXED}
    with client.responses.stream(**fixed) as stream:
        streamed = stream.get_final_response()
    for made in (client.responses.create(**fixed), streamed):
        (call,) = [item for item in made.output if item.type == "function_call"]
        assert (call.namespace, call.name) == ("sky", "weather")
        jsonschema.validate(json.loads(call.arguments), SCHEMA)
    assert streamed.tools[0].type == "namespace"

    told: Any = {"type": "function_call_output", "call_id": call.call_id, "namespace": "sky", "output": "warm"}
    body = {"input": [call.model_dump(), told], "tools": [{**function, "name": "wind"}, group]}
    chat, _ = chat_of(ResponseRequest.model_validate(body))
    assert [tool.function.name for tool in chat.tools or ()] == ["wind", "sky.weather"]
    assert [tool.function.description for tool in chat.tools or ()] == [
        "of a city", "of a city\n\nNamespace sky: Facts about the sky."
    ]  # fmt: skip
    assert [made.function.name for made in chat.messages[0].tool_calls or ()] == ["sky.weather"]


def test_system_messages_that_begin_a_response_are_one() -> None:
    """As Codex sends them; Qwen's template rejects a second one."""
    text, image = {"type": "input_text", "text": "b"}, {"type": "input_image", "image_url": "media:1"}
    user = {"role": "user", "content": "?"}
    first, second = {"role": "developer", "content": [text, text]}, {"role": "system", "content": "c"}

    def made(*items: Any, **fields: Any) -> list[tuple[str, Any]]:
        chat, _ = chat_of(ResponseRequest.model_validate({"input": [*items], **fields}))
        return [(message.role, message.content) for message in chat.messages]

    assert made(first, second, user, second, instructions="a") == [
        ("system", "a\n\nbb\n\nc"), ("user", "?"), ("system", "c")
    ]  # fmt: skip
    assert made(second, user) == [("system", "c"), ("user", "?")]
    with_image = made({"role": "developer", "content": [text, image]}, second, user)
    assert [role for role, _ in with_image] == ["developer", "system", "user"]


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ([{"type": "web_search"}], "tools[0]: no tools are built in"),
        ([{"type": "namespace", "name": "a", "tools": []}], "tools[0].tools: "),
        ([{"type": "namespace", "name": "a", "tools": [{"type": "function", "name": "f"}]},
          {"type": "function", "name": "b c"}], "tools[1].name"),
        ([{"type": "namespace", "name": "a", "tools": [
            {"type": "function", "name": "f"}, {"type": "function", "name": "b c"}]}], "tools[0].tools[1].name"),
    ],
)  # fmt: skip
def test_errors_name_the_tool_of_a_response(client: openai.OpenAI, tools: Any, words: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="", input="?", tools=tools)
    assert words in caught.value.message


def test_a_format_of_the_text_does_not_exclude_required_calls(client: openai.OpenAI) -> None:
    """Instructor sends the same schema as the text's format and as a tool that must be called."""
    tool: dict[str, Any] = {"type": "function", "name": "weather", "parameters": SCHEMA}
    text: Any = {"format": {"type": "json_schema", "name": "weather", "schema": SCHEMA, "strict": True}}
    choice: Any = {"type": "function", "name": "weather"}
    asked: dict[str, Any] = {"model": "", "input": "?", "tools": [tool], "tool_choice": choice, **FIXED}
    made, same = (client.responses.create(**asked, **format, extra_body={"seed": 3}) for format in ({"text": text}, {}))
    assert {item.type for item in made.output} == {"function_call"}
    assert [item.arguments for item in made.output] == [item.arguments for item in same.output]


def test_messages_use_tools(http: RunningHttp) -> None:
    fixed: dict[str, Any] = {
        "model": "", "messages": ASK, "max_tokens": 400,
        "tools": [{"name": "weather", "input_schema": SCHEMA}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }  # fmt: skip
    with anthropic.Anthropic(base_url=http.url, api_key="none", max_retries=0, timeout=60) as client:
        whole = client.messages.create(**fixed)
        (block,) = whole.content
        assert whole.stop_reason == "tool_use" and block.type == "tool_use" and block.name == "weather"
        jsonschema.validate(block.input, SCHEMA)
        with client.messages.stream(**fixed) as stream:
            (block,) = stream.get_final_message().content
        assert block.type == "tool_use"
        jsonschema.validate(block.input, SCHEMA)
        same = {"eager_input_streaming": True, "defer_loading": False, "allowed_callers": ["direct"]}
        call = {"type": "tool_use", "id": "c1", "name": "weather", "input": {}, "caller": {"type": "direct"}}
        turns: Any = [
            *ASK, {"role": "assistant", "content": [call]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "sunny"}]},
        ]  # fmt: skip
        tools: Any = [{**fixed["tools"][0], **same}]
        assert client.messages.create(model="", messages=turns, tools=tools, max_tokens=2).content


@anthropic.beta_tool
def weather(city: Literal["Oslo", "Rome"]) -> str:
    """Weather of a city."""
    return f"sunny in {city}"


def test_the_loop_of_anthropic_s_client_runs_tools(http: RunningHttp) -> None:
    """It asks the server to store the conversation, and sends it whole once it knows that the server does not."""
    choice = {"type": "any", "disable_parallel_tool_use": True}
    fixed: Any = {"model": "", "messages": ASK, "max_tokens": 400, "tool_choice": choice}
    with anthropic.Anthropic(base_url=http.url, api_key="none", max_retries=0, timeout=60) as client:
        made = list(client.beta.messages.tool_runner(**fixed, tools=[weather], max_iterations=2))
        assert [message.stop_reason for message in made] == ["tool_use", "tool_use"]
        assert made[0].usage.input_tokens < made[1].usage.input_tokens + (made[1].usage.cache_read_input_tokens or 0)
        with pytest.raises(anthropic.BadRequestError, match="thread: nothing is stored; send the whole conversation"):
            client.beta.messages.create(**fixed, thread={"type": "create"})


def test_a_number_that_no_double_holds_is_sent_as_it_was_written(tmp_path: Path) -> None:
    model = make_calling(tmp_path / "tiny")
    text = "<tool_call><function=weather><parameter=days>1e999</parameter></function></tool_call>"
    engine = Scripted(Tokenizer(model / "tokenizer.json").encode(text))
    schema = {"type": "object", "properties": {"days": {"type": "number"}}}
    function = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    with RunningServer(str(model), engine=engine) as server, RunningHttp([server.address]) as http:
        ask: Any = {"messages": ASK, "max_tokens": 400, "tools": [{"name": "weather", "input_schema": schema}]}
        answer = httpx.post(f"{http.url}/v1/messages", json=ask, timeout=60)
        turn = {"role": "assistant", "content": answer.json()["content"]}
        again = [httpx.post(f"{http.url}/v1/messages", json={**ask, "messages": [*ASK, turn, *ASK]}, timeout=60)]
        ask["tools"] = [function]
        called = httpx.post(f"{http.url}/v1/chat/completions", json=ask, timeout=60)
        ask["messages"] = [*ASK, called.json()["choices"][0]["message"], *ASK]
        again += [httpx.post(f"{http.url}/v1/chat/completions", json=ask, timeout=60)]
    assert "Infinity" not in answer.text
    assert answer.json()["content"][0]["input"] == {"arguments": '{"days": 1e999}'}
    assert ask["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"days": 1e999}'
    assert [answer.status_code for answer in again] == [200, 200], "a client can send back what it has received"


def test_a_call_that_breaks_off_is_incomplete_in_a_response(tmp_path: Path) -> None:
    model = make_calling(tmp_path / "tiny")
    text = "<tool_call><function=weather><parameter=city>Os"
    engine = Scripted(Tokenizer(model / "tokenizer.json").encode(text))
    tools: Any = [{"type": "function", "name": "weather", "parameters": SCHEMA}]
    ask: dict[str, Any] = {"model": "", "input": "?", "tools": tools, "max_output_tokens": 400}
    with (
        RunningServer(str(model), engine=engine) as server,
        RunningHttp([server.address]) as http,
        openai.OpenAI(base_url=f"{http.url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        whole = client.responses.create(**ask)
        events: list[Any] = list(client.responses.create(**ask, stream=True))
    for made in (whole, events[-1].response):
        (call,) = made.output
        assert (made.status, call.status, call.arguments) == ("incomplete", "incomplete", '{"city": "Os')


class Scored(Scripted):
    """All tokens have log-probabilities."""

    def start(self, on_events: EventSink) -> None:
        super().start(lambda events: on_events([event._replace(logprob=-0.5) for event in events]))


@pytest.mark.parametrize("scored", [False, True])
def test_a_response_and_its_stream_have_the_same_texts_calls_and_log_probabilities(
    tmp_path: Path, scored: bool
) -> None:
    """Also if all tokens arrive at once: a text is before or after a call, and has the log-probabilities of its own
    tokens."""
    model = make_calling(tmp_path / "tiny")
    call = "<tool_call><function=weather><parameter=city>Oslo</parameter></function></tool_call>"
    engine = Scored(Tokenizer(model / "tokenizer.json").encode(f"Let me see.{call}Así.{call}"))
    ask: dict[str, Any] = {
        "input": "?", "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}],
        "max_output_tokens": 400, "include": ["message.output_text.logprobs"] if scored else [],
    }  # fmt: skip
    with (
        RunningServer(str(model), engine=engine) as server,
        RunningHttp([server.address]) as http,
        openai.OpenAI(base_url=f"{http.url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        whole = client.responses.create(model="", **ask)
        events: list[Any] = list(client.responses.create(model="", **ask, stream=True))
    for output in (whole.output, events[-1].response.output):
        assert [item.type for item in output] == ["message", "function_call"] * 2
        for item, text in zip(output[::2], ("Let me see.", "Así."), strict=True):
            assert item.content[0].text == text
            scores = item.content[0].logprobs
            assert b"".join(bytes(score.bytes) for score in scores) == (text.encode() if scored else b"")


def test_a_message_and_its_stream_have_the_same_blocks(tmp_path: Path) -> None:
    model = make_calling(tmp_path / "tiny")
    call = "<tool_call><function=weather><parameter=city>Oslo</parameter></function></tool_call>"
    engine = Scripted(Tokenizer(model / "tokenizer.json").encode(f"Let me see.{call}Wait.{call}"))
    ask: dict[str, Any] = {
        "model": "", "messages": ASK, "max_tokens": 400, "tools": [{"name": "weather", "input_schema": SCHEMA}]
    }  # fmt: skip
    with (
        RunningServer(str(model), engine=engine) as server,
        RunningHttp([server.address]) as http,
        anthropic.Anthropic(base_url=http.url, api_key="none", max_retries=0, timeout=60) as client,
    ):
        whole = client.messages.create(**ask)
        with client.messages.stream(**ask) as stream:
            streamed = stream.get_final_message()
    for message in (whole, streamed):
        found = [block.text if block.type == "text" else block.input for block in message.content]
        assert found == ["Let me see.", {"city": "Oslo"}, "Wait.", {"city": "Oslo"}]
    assert (whole.stop_reason, whole.usage) == (streamed.stop_reason, streamed.usage)


def test_clients_can_send_back_their_own_objects(tmp_path: Path) -> None:
    """With the keys that they add: null where the server knows nothing of them, and the index of a streamed call."""
    model = make_calling(tmp_path / "tiny")
    call = "<tool_call><function=weather><parameter=city>Oslo</parameter></function></tool_call>"
    engine = Scripted(Tokenizer(model / "tokenizer.json").encode(f"Let me see.{call}"))
    with (
        RunningServer(str(model), engine=engine) as server,
        RunningHttp([server.address]) as http,
        openai.OpenAI(base_url=f"{http.url}/v1", api_key="none", max_retries=0, timeout=60) as client,
        anthropic.Anthropic(base_url=http.url, api_key="none", max_retries=0, timeout=60) as other,
    ):
        ask: dict[str, Any] = {"model": "", "messages": ASK, "tools": TOOLS, "max_tokens": 400}
        chunks = list(client.chat.completions.create(**ask, stream=True))
        deltas = [call for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or []]
        streamed = deltas[0].model_dump()
        streamed["function"]["arguments"] = "".join(call.function.arguments for call in deltas)
        whole = client.chat.completions.create(**ask).choices[0].message.model_dump()
        for said in (whole, {**whole, "tool_calls": [streamed]}):
            told = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "sunny"}
            assert client.chat.completions.create(**{**ask, "messages": [*ASK, said, told]}).choices
        asked: dict[str, Any] = {"model": "", "tools": [{"type": "function", **TOOLS[0]["function"]}]}
        items = [item.model_dump() for item in client.responses.create(input="?", **asked).output]
        result = {"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "sunny"}
        assert client.responses.create(input=[*ASK, *items, result], **asked).output
        ask["tools"] = [{"name": "weather", "input_schema": SCHEMA}]
        blocks = [block.model_dump() for block in other.messages.create(**ask).content]
        block = {"type": "tool_result", "tool_use_id": blocks[-1]["id"], "content": "sunny"}
        turns = [*ASK, {"role": "assistant", "content": blocks}, {"role": "user", "content": [block]}]
        assert other.messages.create(**{**ask, "messages": turns}).content
        for failed, ignored in ((True, "is_error"), (False, None)):
            block["is_error"] = failed
            raw = other.messages.with_raw_response.create(**{**ask, "messages": turns})
            assert raw.headers.get("x-saccade-ignored") == ignored


APART = [
    Delta("Let me see.", []),
    Delta("", [], tool_calls=[ToolCallDelta(0, '{"city": "Oslo"}', "c0", "weather")]),
    Delta("Wait.", []),
    Delta("", [], tool_calls=[ToolCallDelta(1, '{"city": "Rome"}', "c1", "weather")]),
]
TOGETHER = [
    Delta("Let me see.", [], tool_calls=[ToolCallDelta(0, '{"city": ', "c0", "weather")]),
    Delta("Wait.", [], tool_calls=[ToolCallDelta(0, '"Oslo"}'), ToolCallDelta(1, '{"city": ', "c1", "weather")]),
    Delta("", [], tool_calls=[ToolCallDelta(1, '"Rome"}')]),
]
"""A piece has what was generated since the one before it: under load, text and parts of the calls around it."""


@contextlib.contextmanager
def sending(events: Events, pieces: list[Delta]) -> Iterator[str]:
    """The address of a server that answers with these events."""
    sample = Sample("Let me see.Wait.", [], "tool_calls", Usage())
    answer = Generation(sample.text, [], sample.finish_reason, sample.usage, None, [sample])
    begun = events.begin(inference_pb2.Started(model="tiny"))
    body = b"".join([begun, *map(events.piece, pieces), events.end(answer)])

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("pieces", [APART, TOGETHER], ids=["apart", "together"])
def test_text_between_calls_in_a_streamed_response(pieces: list[Delta]) -> None:
    events = ResponseEvents("r", ResponseRequest(input="?"))
    with (
        sending(events, pieces) as url,
        openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client,
        client.responses.stream(model="", input="?") as stream,
    ):
        output = stream.get_final_response().output
    found = [i.content[0].text if i.type == "message" else (i.call_id, i.name, i.arguments) for i in output]
    assert found == [
        "Let me see.", ("c0", "weather", '{"city": "Oslo"}'), "Wait.", ("c1", "weather", '{"city": "Rome"}')
    ]  # fmt: skip
    assert len({item.id for item in output}) == 4


@pytest.mark.parametrize(
    ("piece", "kind", "text"),
    [
        (Delta("Let me", []), "message", "Let me"),
        (Delta("", [], reasoning="hm"), "reasoning", "hm"),
        (Delta("", [], tool_calls=[ToolCallDelta(0, '{"ci', "c0", "weather")]), "function_call", '{"ci'),
    ],
)
def test_a_response_that_failed_has_what_was_written(piece: Delta, kind: str, text: str) -> None:
    events = ResponseEvents("r", ResponseRequest(input="?"))
    events.begin(inference_pb2.Started())
    events.piece(piece)
    told = events.error({"code": "ENGINE_DIED", "message": "it died"}, 503).decode()
    assert told.startswith("event: response.failed\n") and told.count("event: ") == 1
    (item,) = json.loads(told.partition("data: ")[2])["response"]["output"]
    written = item["arguments"] if kind == "function_call" else item["content"][0]["text"]
    assert (item["type"], written) == (kind, text)
    assert item.get("status", "incomplete") == "incomplete"


def test_consecutive_reasoning_items_belong_to_one_turn() -> None:
    def thought(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

    call = {"type": "function_call", "call_id": "c0", "name": "weather", "arguments": "{}"}
    said = {"type": "message", "role": "assistant", "content": "yes"}
    conversation = [thought("a"), thought("b"), said, thought("c"), call, thought("d"), call]
    made = chat_of(ResponseRequest.model_validate({"input": conversation}))[0].model_dump()["messages"]
    assert [(m["reasoning"], m["content"], len(m["tool_calls"] or ())) for m in made] == [
        ("ab", "yes", 0), ("c", "", 1), ("d", "", 1)
    ]  # fmt: skip


def test_each_text_of_an_answer_is_in_the_next_turn(client: openai.OpenAI) -> None:
    def prompt_tokens(text: str) -> int:
        conversation: Any = [
            {"role": "user", "content": "?"},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]},
            {"type": "function_call", "call_id": "c0", "name": "weather", "arguments": "{}"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Wait."}]},
            {"type": "function_call_output", "call_id": "c0", "output": "sunny"},
        ]
        answer = client.responses.create(model="", input=conversation, max_output_tokens=1)
        assert answer.usage
        return answer.usage.input_tokens

    assert prompt_tokens("Let me see. " * 9) > prompt_tokens("Let me see.")


@pytest.mark.parametrize("pieces", [APART, TOGETHER], ids=["apart", "together"])
def test_text_between_calls_in_a_streamed_message(pieces: list[Delta]) -> None:
    ask: dict[str, Any] = {"model": "", "max_tokens": 9, "messages": ASK}
    with (
        sending(MessageEvents("r", 400), pieces) as url,
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60) as client,
        client.messages.stream(**ask) as stream,
    ):
        content = stream.get_final_message().content
    found = [block.text if block.type == "text" else (block.id, block.name, block.input) for block in content]
    assert found == [
        "Let me see.", ("c0", "weather", {"city": "Oslo"}), "Wait.", ("c1", "weather", {"city": "Rome"})
    ]  # fmt: skip
