"""Batches of Anthropic's Messages API, with its own client."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import grpc
import httpx
import openai
import pydantic
import pytest
from anthropic.types.messages import MessageBatch, MessageBatchIndividualResponse
from calling import SCHEMA, make_calling
from images import png
from running import RunningServer
from running_http import RunningHttp

from saccade.v1 import batch_pb2, batch_pb2_grpc

IMAGE = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png(3)).decode()}
SAID: list[Any] = [{"role": "user", "content": "what is it?"}]


def asked(custom_id: str, **params: Any) -> Any:
    return {"custom_id": custom_id, "params": {"model": "", "max_tokens": 6, "messages": SAID, **params}}


@pytest.fixture(scope="module")
def client(http: RunningHttp) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=http.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def ended(client: anthropic.Anthropic, batch: MessageBatch) -> MessageBatch:
    while batch.processing_status != "ended":
        batch = client.messages.batches.retrieve(batch.id)
    return batch


def found(client: anthropic.Anthropic, batch: MessageBatch) -> dict[str, Any]:
    """The results by their ids, which have exactly the fields of the client's types."""
    results = list(client.messages.batches.results(batch.id))
    for each in results:
        MessageBatchIndividualResponse.model_validate_json(each.to_json(), strict=True)
    return {each.custom_id: each.result for each in results}


def test_results_are_the_messages_of_single_requests(http: RunningHttp, client: anthropic.Anthropic) -> None:
    look = [{"type": "image", "source": IMAGE}, {"type": "text", "text": "what is it?"}]
    requests = [
        asked("plain", system="be brief"),
        asked("stopped", stop_sequences=["a", "e", "i", "o", "u", " ", "t"], max_tokens=200),
        asked("image", messages=[{"role": "user", "content": look}]),
        asked("long", max_tokens=32_000),
        asked("refused", messages=[{"role": "user", "content": "x" * 5000}]),
        asked(
            "broken",
            system="s",
            messages=[{"role": "user", "content": [{**look[0], "source": {**IMAGE, "data": "AAAA"}}]}],
        ),
    ]
    for request in requests:
        request["params"] |= {"temperature": 0, "seed": 3}
    made = client.messages.batches.create(requests=requests)
    assert made.processing_status == "in_progress" and made.request_counts.processing == len(requests)
    assert made.results_url is None and made.ended_at is None
    batch = ended(client, made)
    counts = batch.request_counts
    assert (counts.processing, counts.succeeded, counts.errored, counts.canceled, counts.expired) == (0, 4, 2, 0, 0)
    assert batch.ended_at and batch.created_at <= batch.ended_at <= batch.expires_at
    results = found(client, batch)
    assert results.keys() == {request["custom_id"] for request in requests}
    for request in requests[:-2]:
        body = {**request["params"]}
        answer = httpx.post(f"{http.url}/v1/messages", json=body, timeout=60).json()
        message = results[request["custom_id"]].message
        assert [block.to_dict() for block in message.content] == answer["content"]
        assert (message.stop_reason, message.stop_sequence) == (answer["stop_reason"], answer["stop_sequence"])
        assert message.usage.output_tokens == answer["usage"]["output_tokens"]
    assert results["long"].message.stop_reason == "model_context_window_exceeded"
    error = results["refused"].error.error
    assert error.type == "invalid_request_error" and "the prompt is too long" in error.message
    assert results["broken"].error.error.message.startswith("messages: no PNG"), "it is the second message of a chat"
    assert client.messages.batches.delete(batch.id).type == "message_batch_deleted"
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.retrieve(batch.id)


def test_the_two_kinds_of_batches_are_listed_apart(http: RunningHttp, client: anthropic.Anthropic) -> None:
    batches = client.messages.batches
    made = [ended(client, batches.create(requests=[asked("a")])).id for _ in range(3)][::-1]
    assert [batch.id for batch in batches.list(limit=2)] == made  # the client asks for the second page
    page = batches.list(limit=1, before_id=made[2])
    assert [batch.id for batch in page.data] == [made[1]] and page.has_more
    with pytest.raises(anthropic.NotFoundError, match="after_id: there is no batch"):
        batches.list(after_id="batch_x")
    with openai.OpenAI(base_url=f"{http.url}/v1", api_key="none", max_retries=0, timeout=60) as other:
        assert not {batch.id for batch in other.batches.list()} & set(made)
        with pytest.raises(openai.NotFoundError):
            other.batches.retrieve(made[0])
        row = b'{"custom_id": "a", "body": {"messages": [{"role": "user", "content": "?"}], "max_tokens": 1}}'
        file = other.files.create(file=("in.jsonl", row), purpose="batch")
        theirs = other.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )  # fmt: skip
        with pytest.raises(anthropic.NotFoundError):
            batches.retrieve(theirs.id)
        while other.batches.retrieve(theirs.id).status != "completed":
            pass
        other.files.delete(f"file-output-{theirs.id}")
        other.files.delete(file.id)
    for batch_id in made:
        batches.delete(batch_id)


def test_a_batch_of_a_grpc_client_that_looks_like_one_of_messages(
    server: RunningServer, client: anthropic.Anthropic
) -> None:
    row = b'{"custom_id": "a", "body": {"messages": [{"role": "user", "content": "?"}], "max_tokens": 1}}'
    header = batch_pb2.BatchHeader(
        size_bytes=len(row), input_name="/v1/messages/batches", metadata={"requests": "many"}
    )  # fmt: skip
    parts = [batch_pb2.CreateBatchRequest(header=header), batch_pb2.CreateBatchRequest(chunk=row)]
    with grpc.insecure_channel(server.address) as channel:
        made = batch_pb2_grpc.BatchServiceStub(channel).CreateBatch(iter(parts), timeout=60).batch.batch_id
    assert made in [batch.id for batch in client.messages.batches.list()]
    batch = ended(client, client.messages.batches.retrieve(made))
    assert batch.request_counts.succeeded == 1 and found(client, batch)["a"].type == "succeeded"
    client.messages.batches.delete(made)


def test_a_cancelled_batch_keeps_what_was_answered(model: Path) -> None:
    with (
        RunningServer(str(model), max_seqs=1, max_len=9000, batch_concurrency=1) as server,
        RunningHttp([server.address]) as http,
        anthropic.Anthropic(base_url=http.url, api_key="none", max_retries=0, timeout=60) as client,
    ):
        endless: Any = {"max_tokens": 8000, "temperature": 0}
        made = client.messages.batches.create(requests=[asked("a"), asked("b", **endless), asked("c", **endless)])
        while server.server._batch_store.record(made.id).completed < 1:
            pass
        assert client.messages.batches.retrieve(made.id).request_counts.processing == 3
        with pytest.raises(anthropic.BadRequestError, match="cancel it first"):
            client.messages.batches.delete(made.id)
        with pytest.raises(anthropic.AnthropicError, match="results_url"):
            client.messages.batches.results(made.id)
        batch = ended(client, client.messages.batches.cancel(made.id))
        counts = batch.request_counts
        assert batch.cancel_initiated_at and (counts.succeeded, counts.canceled, counts.errored) == (1, 2, 0)
        assert found(client, batch).keys() == {"a"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_tokens": 0}, "requests[1].params.max_tokens: "),
        ({"stream": True}, "requests[1].params.stream: it is not supported"),
        ({"thread": {}}, "requests[1].params.thread: it is not supported"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "requests[1].params.thinking.display: "),
        ({"messages": [{"role": "user", "content": ""}]}, "requests[1].params: messages[0].content: expected content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "https://a.b/c"}}]}]},
            "requests[1].params: messages[0].content[0]: ",
        ),
    ],
)  # fmt: skip
def test_a_request_that_no_server_takes_is_named(
    client: anthropic.Anthropic, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.batches.create(requests=[asked("a"), asked("b", **change)])
    assert words in caught.value.body["error"]["message"]  # type: ignore[index]


def test_ids_are_unique(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"requests\[2\].custom_id: 'a' is that of requests\[0\] too"):
        client.messages.batches.create(requests=[asked("a"), asked("b"), asked("a")])


def test_calls_are_blocks(tmp_path: Path) -> None:
    with (
        RunningServer(str(make_calling(tmp_path / "tiny")), dtype="float32", max_seqs=4, max_len=900) as server,
        RunningHttp([server.address]) as http,
        anthropic.Anthropic(base_url=http.url, api_key="none", max_retries=0, timeout=60) as client,
    ):
        schema = {**SCHEMA, "description": None}
        tools = [{"name": "weather", "input_schema": schema}]
        choice = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
        params = {"tools": tools, "tool_choice": choice, "max_tokens": 500}
        batch = ended(client, client.messages.batches.create(requests=[asked("a", **params)]))
        message = found(client, batch)["a"].message
        (block,) = message.content
        assert (block.type, block.name, message.stop_reason) == ("tool_use", "weather", "tool_use")
        assert block.input.keys() >= set(SCHEMA["required"])


def test_the_object_has_the_fields_of_the_client_s_type(http: RunningHttp, client: anthropic.Anthropic) -> None:
    body = {"requests": [asked("a")]}
    answer = httpx.post(f"{http.url}/v1/messages/batches", json=body, headers={"x-api-key": "none"}, timeout=60)
    batch = pydantic.TypeAdapter(MessageBatch).validate_json(answer.content, strict=True)
    assert set(batch.model_extra or {}) == {"saccade"}
    client.messages.batches.delete(ended(client, batch).id)
