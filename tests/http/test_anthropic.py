"""Anthropic's own Python client, unmodified, against the HTTP server."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import anthropic
import pytest
from images import png
from running import RunningServer
from running_http import RunningHttp

import saccade
from saccade import errors
from saccade._openai.anthropic_schema import MessagesRequest, chat_of
from saccade._openai.errors import error_object
from service.http.call import http_status
from service.http.messages import MessageEvents, anthropic_error
from service.http.models import models_page

ASK: dict[str, Any] = {"model": "", "max_tokens": 20, "messages": [{"role": "user", "content": "what is it?"}]}

GREEDY: Any = {"temperature": 0}
"""Its methods have no argument of that name."""


@pytest.fixture(scope="module")
def client(http: RunningHttp, server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=http.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client
    http.idle()
    server.drained()


def test_a_message_is_the_answer_of_grpc(client: anthropic.Anthropic, grpc_client: saccade.Client) -> None:
    made = client.messages.create(**ASK, system="be brief", extra_body={**GREEDY, "speed": "standard"})
    same = grpc_client.chat("what is it?", system="be brief", max_tokens=20, temperature=0)
    assert "".join(block.text for block in made.content if block.type == "text") == same.text
    assert made.stop_reason == ("max_tokens" if same.finish_reason == "length" else "end_turn")
    usage = made.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == same.usage.prompt_tokens
    assert usage.output_tokens == same.usage.completion_tokens
    counted = client.messages.count_tokens(model="", system="be brief", messages=ASK["messages"])
    assert counted.input_tokens == same.usage.prompt_tokens


def test_the_context_may_end_an_answer_before_max_tokens(client: anthropic.Anthropic) -> None:
    """As with Anthropic's models, whose clients ask for more tokens than small contexts hold."""

    def asking(text: str) -> Any:
        return {"model": "", "messages": [{"role": "user", "content": text}]}

    text = "a"
    while (count := client.messages.count_tokens(**asking(text)).input_tokens) < 590:
        text += " a" * max(1, (590 - count) // 4)
    asked: Any = {**asking(text), "max_tokens": 32_000, "extra_body": GREEDY}
    made = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for message in (made, streamed):
        assert message.stop_reason == "model_context_window_exceeded"
        used = message.usage
        assert used.input_tokens + (used.cache_read_input_tokens or 0) + used.output_tokens == 600
    with pytest.raises(anthropic.BadRequestError, match="the prompt is too long"):
        client.messages.create(**asking(text + " a" * 100), max_tokens=1)


def test_a_system_message_is_one_of_the_messages(client: anthropic.Anthropic) -> None:
    for content in ("be brief", [{"type": "text", "text": "be brief"}]):
        messages: Any = [{"role": "system", "content": content}, *ASK["messages"]]
        counted = client.messages.count_tokens(model="", messages=messages)
        assert counted == client.messages.count_tokens(model="", system="be brief", messages=ASK["messages"])


def test_what_claude_code_sends_changes_nothing(client: anthropic.Anthropic) -> None:
    """An effort that is the API's default, although this template does not use it, and an edit that keeps all."""
    sent = {
        "output_config": {"effort": "high"}, "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }  # fmt: skip
    plain, answer = (client.messages.create(**ASK, extra_body=GREEDY | more) for more in ({}, sent))
    assert answer.content == plain.content
    used = [made.usage.input_tokens + (made.usage.cache_read_input_tokens or 0) for made in (plain, answer)]
    assert used[0] == used[1]


def test_a_template_is_told_the_effort() -> None:
    asked = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 9}
    given = [
        chat_of(MessagesRequest.model_validate({**asked, "output_config": {"effort": effort}}))
        for effort in ("high", "low")
    ]
    assert [chat.chat_template_kwargs for chat, _ in given] == [{"reasoning_effort": "high"}, None]
    assert [chat.reasoning_effort for chat, _ in given] == [None, "low"]


def test_clients_know_the_id_of_a_request(client: anthropic.Anthropic) -> None:
    made = client.messages.create(**ASK)
    assert made._request_id and made.id == f"msg_{made._request_id}"
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**{**ASK, "max_tokens": 0})
    assert caught.value.request_id and caught.value.request_id == caught.value.response.headers["x-request-id"]


def test_a_stream_says_the_same(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**ASK, extra_body=GREEDY)
    with client.messages.stream(**ASK, extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "".join(block.text for block in whole.content if block.type == "text")
    assert final.stop_reason == whole.stop_reason and final.usage.output_tokens == whole.usage.output_tokens
    stopped = client.messages.create(**ASK, extra_body=GREEDY, stop_sequences=[text[3:5]])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text[3:5])


def test_minus_one_is_no_top_k(client: anthropic.Anthropic) -> None:
    """As in vLLM's server of this API."""
    off, none = (client.messages.create(**ASK, extra_body={"seed": 3, "top_k": k}).content for k in (-1, 0))
    assert off == none


def test_a_stream_begins_with_the_cached_part_of_the_prompt(
    client: anthropic.Anthropic, grpc_client: saccade.Client
) -> None:
    asked: Any = {**ASK, "system": "cached " * 40, "extra_body": GREEDY}
    client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        (begun,) = [event.message.usage for event in stream if event.type == "message_start"]
        final = stream.get_final_message().usage
    whole = client.messages.create(**asked).usage
    assert begun.cache_read_input_tokens and begun.cache_creation_input_tokens == 0
    for usage in (final, whole):
        assert usage.cache_read_input_tokens == begun.cache_read_input_tokens
        assert usage.input_tokens == begun.input_tokens
    with grpc_client.stream("what is it?", max_tokens=20, temperature=0, ignore_eos=True) as again:
        deltas = list(again)
        assert sum(delta.cached_tokens for delta in deltas) == again.final().usage.cached_tokens


def test_a_final_message_of_the_assistant_is_continued(
    client: anthropic.Anthropic, grpc_client: saccade.Client
) -> None:
    asked: dict[str, Any] = {"model": "", "max_tokens": 20, "extra_body": GREEDY}
    for content in ("It is", [{"type": "text", "text": "It"}, {"type": "text", "text": " is"}]):
        messages: list[Any] = [*ASK["messages"], {"role": "assistant", "content": content}]
        same = grpc_client.chat(messages, max_tokens=20, temperature=0, continue_final_message=True)
        made = client.messages.create(messages=messages, **asked)
        assert "".join(block.text for block in made.content if block.type == "text") == same.text
        with client.messages.stream(messages=messages, **asked) as stream:
            assert "".join(stream.text_stream) == same.text
        counted = client.messages.count_tokens(model="", messages=messages)
        assert counted.input_tokens == same.usage.prompt_tokens
    for content in ("It is ", [{"type": "text", "text": "It is\n"}]):
        messages = [*ASK["messages"], {"role": "assistant", "content": content}]
        with pytest.raises(
            anthropic.BadRequestError, match=r"messages\[1\].content: final assistant content cannot end"
        ):
            client.messages.create(messages=messages, **asked)


@pytest.mark.parametrize("empty", ["", []], ids=["text", "blocks"])
def test_only_a_final_message_of_the_assistant_may_be_empty(client: anthropic.Anthropic, empty: Any) -> None:
    said: Any = {"role": "assistant", "content": empty}
    for path, messages in (
        ("messages[0]", [{"role": "user", "content": empty}]),
        ("messages[1]", [*ASK["messages"], {"role": "user", "content": empty}]),
        ("messages[1]", [*ASK["messages"], said, *ASK["messages"]]),
    ):
        for ask in (client.messages.create, client.messages.count_tokens):
            limit = {"max_tokens": 1} if ask == client.messages.create else {}
            with pytest.raises(anthropic.BadRequestError, match=re.escape(f"{path}.content: expected content")):
                ask(model="", messages=messages, **limit)
    whole, same = (client.messages.create(**{**ASK, "messages": m}, extra_body=GREEDY).content
                   for m in (ASK["messages"], [*ASK["messages"], said]))  # fmt: skip
    assert whole == same


def test_images(client: anthropic.Anthropic, grpc_client: saccade.Client) -> None:
    photo = png(40)
    source: Any = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(photo).decode()}
    content: list[Any] = [{"type": "image", "source": source}, {"type": "text", "text": "what is it?"}]
    made = client.messages.create(
        model="", max_tokens=8, extra_body=GREEDY, messages=[{"role": "user", "content": content}]
    )
    same = grpc_client.generate("what is it?", images=[photo], max_tokens=8, temperature=0)
    assert made.content[0].type == "text" and made.content[0].text == same.text


def test_models(client: anthropic.Anthropic, grpc_client: saccade.Client) -> None:
    served = grpc_client.get_model()
    page = client.models.list()
    assert (page.first_id, page.last_id, page.has_more) == (served.name, served.name, False)
    (model,) = client.models.list(limit=1)
    assert model == client.models.retrieve(served.name)
    assert (model.type, model.id, model.display_name, model.lifecycle) == ("model", served.name, served.name, "active")
    assert model.created_at.tzinfo and model.max_input_tokens == served.limits.context_length
    assert not list(client.models.list(after_id=served.name)) and not list(client.models.list(before_id=served.name))
    assert not list(client.models.list(lifecycle=["retired"]))
    with pytest.raises(anthropic.BadRequestError, match="limit: expected a number from 1 to 1000"):
        client.models.list(limit=0)
    for ask in (lambda: client.models.retrieve("nothing"), lambda: client.models.list(after_id="nothing")):
        with pytest.raises(anthropic.NotFoundError, match="nothing") as caught:
            ask()
        body: Any = caught.value.body
        assert body["error"]["type"] == "not_found_error" and caught.value.request_id


def test_pages_of_models(grpc_client: saccade.Client) -> None:
    models = [replace(grpc_client.get_model(), name=name) for name in "abcd"]
    for query, names, more in (
        ({}, "abcd", False),
        ({"limit": ["3"]}, "abc", True),
        ({"limit": ["3"], "after_id": ["c"]}, "d", False),
        ({"limit": ["1"], "after_id": ["a"]}, "b", True),
        ({"limit": ["2"], "before_id": ["d"]}, "bc", True),
        ({"limit": ["2"], "before_id": ["c"]}, "ab", False),
    ):
        page = models_page(models, query)
        assert [model["id"] for model in page["data"]] == list(names) and page["has_more"] == more
        assert (page["first_id"], page["last_id"]) == (names[0], names[-1])


def test_errors_are_anthropics(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**{**ASK, "max_tokens": 0})
    body: Any = caught.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert "max_tokens" in body["error"]["message"] and body["request_id"]
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**ASK, "model": "nothing"})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.type: "),
        ({"output_config": {"effort": "low"}}, "output_config.effort: "),
        ({"stop_sequences": [""]}, "stop_sequences[0] has 0 characters"),
        ({"messages": [{"role": "user", "content": [
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}]}]},
         "messages[0].content[0]: no PNG"),
        ({"system": "s", "messages": [*ASK["messages"], {"role": "user", "content": [
            {"type": "text", "text": "a"}, {"type": "image", "source": {"type": "url", "url": "/etc/passwd"}}]}]},
         "messages[1].content[1]: expected a data URL"),
        ({"tools": [{"name": "a b", "input_schema": {"type": "object"}}]}, "tools[0].name"),
        ({"tools": [{"name": "a", "input_schema": {"type": "object"}, "defer_loading": True}]},
         "tools[0].defer_loading"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
         "context_management.edits[0].type: input should be 'clear_thinking_20251015'"),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns"}}]}},
         "context_management.edits[0].keep: input should be 'all'"),
        ({"speed": "fast"}, "speed: input should be 'standard', got 'fast'"),
    ],
)  # fmt: skip
def test_errors_name_the_field(client: anthropic.Anthropic, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.post("/v1/messages", cast_to=object, body={**ASK, **changes})
    body: Any = caught.value.body
    assert words in body["error"]["message"]
    assert not re.search(r"\b(chat|sampling|parts)[.\[]", body["error"]["message"])


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.DeadlineExceeded("x"), "timeout_error"), (errors.Unavailable("x"), "overloaded_error"),
        (errors.Internal("x"), "api_error"),
    ],
)  # fmt: skip
def test_an_error_within_a_stream_has_the_type_of_one_before_it(error: errors.SaccadeError, kind: str) -> None:
    status = http_status(error)
    told = error_object(error, status)
    event, data = MessageEvents("r", 1).error(told, status).decode().splitlines()[:2]
    assert event == "event: error"
    assert json.loads(data.removeprefix("data: ")) == anthropic_error(told, status)
    assert json.loads(data.removeprefix("data: "))["error"]["type"] == kind
