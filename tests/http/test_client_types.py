"""Answers, whole and streamed, have the fields and types that OpenAI's and Anthropic's clients declare, and no others
than those that docs/http.md describes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pydantic
import pytest
from anthropic.types import Message, MessageTokensCount, ModelInfo, RawMessageStreamEvent
from openai.types import Batch, Completion, CreateEmbeddingResponse, FileDeleted, FileObject, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from running_http import RunningHttp

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "what is it?"}], "max_tokens": 20, "seed": 5}
OURS = {"saccade", "seed", "stop_reason", "video_tokens", "max_model_len", "store"}
"""Fields that the clients' types lack."""
LOGPROB_BYTES = {"bytes"}
"""Of log-probabilities in the deltas of a response; those of its items have them in the clients' types too."""


def extras(value: Any) -> Iterator[str]:
    """The names of fields that a type of the clients does not declare."""
    if isinstance(value, pydantic.BaseModel):
        yield from value.model_extra or ()
        for name in type(value).model_fields:
            yield from extras(getattr(value, name, None))
    elif isinstance(value, list):
        for item in value:
            yield from extras(item)


def check(kind: Any, document: Any, more: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    made = pydantic.TypeAdapter(kind).validate_json(json.dumps(document), strict=True)
    assert set(extras(made)) <= OURS | more


def events(http: RunningHttp, path: str, body: dict[str, Any]) -> list[Any]:
    """The documents of a stream, without the mark of its end."""
    text = httpx.post(http.url + path, json={**body, "stream": True}, timeout=60).text
    data = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(each) for each in data if each != "[DONE]"]


def whole(http: RunningHttp, path: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(http.url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_chat_completions_and_completions(http: RunningHttp) -> None:
    for more in ({}, {"logprobs": True, "top_logprobs": 2}, {"n": 2}):
        check(ChatCompletion, whole(http, "/v1/chat/completions", ASK | more))
        for chunk in events(http, "/v1/chat/completions", ASK | more | {"stream_options": {"include_usage": True}}):
            check(ChatCompletionChunk, chunk)
    check(Completion, whole(http, "/v1/completions", {"prompt": "a", "logprobs": 2}))
    check(CreateEmbeddingResponse, whole(http, "/v1/embeddings", {"input": ["a", "b"]}))


@pytest.mark.parametrize("more", [{}, {"top_logprobs": 3, "temperature": 5}])
def test_responses(http: RunningHttp, more: dict[str, Any]) -> None:
    """At a high temperature, some tokens have no text."""
    asked = {"input": "?", "max_output_tokens": 40, "seed": 5, **more}
    check(Response, whole(http, "/v1/responses", asked))
    for event in events(http, "/v1/responses", asked):
        check(ResponseStreamEvent, event, LOGPROB_BYTES)


def test_messages(http: RunningHttp) -> None:
    check(Message, whole(http, "/v1/messages", ASK))
    for event in events(http, "/v1/messages", ASK):
        check(RawMessageStreamEvent, event)
    check(MessageTokensCount, whole(http, "/v1/messages/count_tokens", {"messages": ASK["messages"]}))
    headers = {"anthropic-version": "2023-06-01"}
    for model in httpx.get(f"{http.url}/v1/models", headers=headers, timeout=60).json()["data"]:
        check(ModelInfo, model)


def test_models_files_and_batches(http: RunningHttp) -> None:
    with httpx.Client(base_url=http.url, timeout=60) as client:
        for model in client.get("/v1/models").json()["data"]:
            check(Model, model)
        row = json.dumps({"custom_id": "a", "body": ASK})
        form: Any = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", row)}}
        file = client.post("/v1/files", **form).json()
        check(FileObject, file)
        asked = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = client.post("/v1/batches", json=asked).json()
        check(Batch, batch)
        while batch["status"] != "completed":
            batch = client.get(f"/v1/batches/{batch['id']}").json()
        check(Batch, batch)
        output = client.get(f"/v1/files/{batch['output_file_id']}").json()
        check(FileObject, output)
        for file_id in (file["id"], output["id"]):
            check(FileDeleted, client.delete(f"/v1/files/{file_id}").json())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_a_cache_cannot_be_filled_without_an_answer(http: RunningHttp, path: str) -> None:
    asked = ASK if path.startswith("/v1/chat") else {"input": "?", "max_output_tokens": 2}
    options = {"mode": "implicit", "ttl": "30m", "prewarm": False}
    assert whole(http, path, {**asked, "prompt_cache_options": options})
    refused = httpx.post(
        http.url + path, json={**asked, "prompt_cache_options": {"prewarm": True}}, timeout=60
    )  # fmt: skip
    assert refused.status_code == 400 and "prompt_cache_options: prewarm: " in refused.json()["error"]["message"]
