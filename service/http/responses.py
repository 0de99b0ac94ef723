"""`/v1/responses`, without state: each request contains the whole conversation, and nothing is stored."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any, Literal

from saccade._openai.answers import extension, logprobs_object
from saccade._openai.fields import RESPONSE, response_rules
from saccade._openai.problems import validated
from saccade._openai.response_schema import InputImage, ResponseRequest, chat_of, functions_of, namespaced
from saccade.types import Delta, Generation, TokenLogprob, ToolCallDelta, Usage
from saccade.v1 import inference_pb2
from service.http.call import HttpCall, beside
from service.http.chat import build_converted, prompt_tokens
from service.http.streams import Events, calls_of, named_event, read_events, stream_events, whole_answer

_INCOMPLETE = {"length": "max_output_tokens", "aborted": "aborted"}
"""Finish reasons of answers that were cut off, and what responses call them."""


async def responses(call: HttpCall) -> None:
    """Answers a request of OpenAI's Responses API, as a whole or as a stream of events."""
    call.fields = RESPONSE
    body = validated(ResponseRequest, await call.json())
    call.fields = response_rules([path for path, _, _ in functions_of(body)])
    request = await beside(call.held, lambda: build_converted(call, chat_of(body)))
    if any(isinstance(part, InputImage) and part.detail for part in _parts(body)):
        call.notes.append(("x-saccade-ignored", "detail"))
    events = ResponseEvents(call.request_id, body)
    if body.stream:
        await stream_events(call, call.caller(), request, events)
        return
    if request.chat.tools:  # a whole answer does not say where its calls are in the text
        await read_events(call, call.caller(), request, events)
        await call.respond(events.response)
        return
    answer = await whole_answer(call, call.caller(), request)
    await call.respond({**_finished(call.request_id, body, answer), "saccade": extension(answer)})


async def count_input_tokens(call: HttpCall) -> None:
    """The number of tokens that the prompt of a request takes."""
    call.fields = RESPONSE
    body = validated(ResponseRequest, await call.json())
    call.fields = response_rules([path for path, _, _ in functions_of(body)])
    counted = await prompt_tokens(call, lambda: chat_of(body))
    await call.respond({"object": "response.input_tokens", "input_tokens": counted})


def _parts(body: ResponseRequest) -> Iterator[Any]:
    for item in body.input if isinstance(body.input, list) else ():
        content = getattr(item, "output" if item.type == "function_call_output" else "content", None)
        yield from content if isinstance(content, list) else ()


def _response(request_id: str, body: ResponseRequest, model: str, created: int) -> dict[str, Any]:
    """A response without its output."""
    text = body.text.format if body.text else None
    return {
        "id": f"resp_{request_id}",
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "model": model,
        "output": [],
        "parallel_tool_calls": True if body.parallel_tool_calls is None else body.parallel_tool_calls,
        "previous_response_id": None,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "store": False,
        "temperature": body.temperature,
        "text": {"format": text.model_dump(exclude_none=True, by_alias=True) if text else {"type": "text"}},
        "tool_choice": "auto" if body.tool_choice is None
        else body.tool_choice if isinstance(body.tool_choice, str) else body.tool_choice.model_dump(),
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }  # fmt: skip


def _finished(request_id: str, body: ResponseRequest, answer: Generation) -> dict[str, Any]:
    made = _response(request_id, body, answer.model, int(time.time()))
    made["output"] = _items(request_id, answer)
    return made | _end_of(answer)


def _status(answer: Generation) -> str:
    """The status of a response that has ended, and of its last message."""
    return "incomplete" if answer.finish_reason in _INCOMPLETE else "completed"


def _end_of(answer: Generation) -> dict[str, Any]:
    """How a response has ended, and its usage."""
    incomplete = _INCOMPLETE.get(answer.finish_reason)
    return {
        "status": _status(answer),
        "incomplete_details": {"reason": incomplete} if incomplete else None,
        "usage": _usage(answer.usage),
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


def _items(request_id: str, answer: Generation) -> list[dict[str, Any]]:
    """The items of an answer without tools."""
    items = [_reasoning(f"rs_{request_id}_0", answer.reasoning)] if answer.reasoning else []
    return [*items, _message(f"msg_{request_id}_{len(items)}", answer.text, answer.logprobs, _status(answer))]


def _reasoning(item_id: str, text: str | None) -> dict[str, Any]:
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": item_id, "summary": [], "content": content}


def _scored(logprobs: list[TokenLogprob] | None) -> list[dict[str, Any]]:
    """Log-probabilities as in chat completions, but the bytes of a token without text are an empty list."""
    scored: list[dict[str, Any]] = logprobs_object(logprobs or [])["content"]
    for token in scored:
        for each in (token, *token["top_logprobs"]):
            each["bytes"] = each["bytes"] or []
    return scored


def _text(text: str, logprobs: list[TokenLogprob] | None) -> dict[str, Any]:
    scored = _scored(logprobs)
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": scored}


def _message(item_id: str, text: str | None, logprobs: list[TokenLogprob] | None, status: str) -> dict[str, Any]:
    content = [] if text is None else [_text(text, logprobs)]
    return {"type": "message", "id": item_id, "role": "assistant", "status": status, "content": content}


def _state(arguments: str) -> str:
    """The status of a call that has ended: `incomplete` if its arguments are not complete JSON."""
    try:
        json.loads(arguments)
    except ValueError:
        return "incomplete"
    return "completed"


def _call(item_id: str, call_id: str, namespace: str | None, name: str) -> dict[str, Any]:
    """A call that begins."""
    item = {
        "type": "function_call", "id": item_id, "call_id": call_id, "name": name, "arguments": "",
        "status": "in_progress",
    }  # fmt: skip
    return item if namespace is None else {**item, "namespace": namespace}


def _last(scores: list[TokenLogprob], text: str) -> list[TokenLogprob]:
    """Those of the last tokens, as many as have the bytes of the text."""
    left, first = len(text.encode()), len(scores)
    while left > 0 and first:
        first -= 1
        left -= len(scores[first].token)
    return scores[first:]


class ResponseEvents(Events):
    """The events of a streamed response, which consists of consecutive items."""

    def __init__(self, request_id: str, body: ResponseRequest) -> None:
        self._id, self._body = request_id, body
        self._named = {
            namespaced(group.name, tool.name): (group.name, tool.name) for _, group, tool in functions_of(body) if group
        }
        """The namespace of each function, and its name there."""
        self._sequence = 0
        self._output: list[dict[str, Any]] = []
        """Items that are complete."""
        self._kind: Literal["reasoning", "message", "call"] | None = None
        """The item that is being written."""
        self._parts: list[str] = []
        self._scores: list[TokenLogprob] = []
        self._held: list[TokenLogprob] = []
        """Log-probabilities to send with the next text of a message: of tokens of reasoning, and of those that are only
        a part of a character."""
        self._item: dict[str, Any] = {}
        self.response: dict[str, Any] = {}
        """The response so far, without its output; after `end`, the whole."""

    def _event(self, kind: str, **fields: Any) -> bytes:
        number = self._sequence
        self._sequence += 1
        return named_event(kind, sequence_number=number, **fields)

    def begin(self, started: inference_pb2.Started) -> bytes:
        self.response = _response(self._id, self._body, started.model, int(time.time()))
        created = self._event("response.created", response=self.response)
        return created + self._event("response.in_progress", response=self.response)

    def _at(self) -> dict[str, Any]:
        return {"item_id": self._item["id"], "output_index": len(self._output)}

    def _next_id(self, kind: str) -> str:
        """The id of the item after the one that is being written; text may continue after a call, for example."""
        return f"{kind}_{self._id}_{len(self._output) + (self._kind is not None)}"

    def _open(self, kind: Literal["reasoning", "message", "call"], item: dict[str, Any]) -> bytes:
        """Ends the current item and begins another."""
        data = self._close()
        self._kind, self._item, self._parts, self._scores = kind, item, [], []
        data += self._event("response.output_item.added", output_index=len(self._output), item=item)
        if kind == "message":
            data += self._event("response.content_part.added", **self._at(), content_index=0, part=_text("", None))
        return data

    def _close(self, status: str = "completed") -> bytes:
        """Ends the current item, if any. `status`: of a message."""
        data = self._written("") if self._kind == "message" and self._held else b""
        text = "".join(self._parts)
        if self._kind is None:
            return data
        if self._kind == "message":
            done = _message(self._item["id"], text, self._scores, status)
            part = done["content"][0]
            at = {**self._at(), "content_index": 0}
            data += self._event("response.output_text.done", **at, text=text, logprobs=part["logprobs"])
            data += self._event("response.content_part.done", **at, part=part)
        elif self._kind == "reasoning":
            done = _reasoning(self._item["id"], text)
            data += self._event("response.reasoning_text.done", **self._at(), content_index=0, text=text)
        else:
            done = {**self._item, "arguments": text, "status": _state(text)}
            name = self._item["name"]
            data += self._event("response.function_call_arguments.done", **self._at(), name=name, arguments=text)
        data += self._event("response.output_item.done", output_index=len(self._output), item=done)
        self._output.append(done)
        self._kind = None
        return data

    def piece(self, delta: Delta) -> bytes:
        rest, begun = calls_of(delta)
        data = b"".join(map(self._arguments, rest))
        if delta.tool_calls:  # the tokens without text before a call are markup
            self._held = []
        if delta.text or not delta.tool_calls:
            self._held += delta.logprobs or []
        if delta.reasoning:
            if self._kind != "reasoning":
                data += self._open("reasoning", _reasoning(self._next_id("rs"), None))
            self._parts.append(delta.reasoning)
            data += self._event("response.reasoning_text.delta", **self._at(), content_index=0, delta=delta.reasoning)
        if delta.text:
            if self._kind == "call":  # tokens of the end of its markup come before those of the text
                self._held = _last(self._held, delta.text)
            if self._kind != "message":
                data += self._open("message", _message(self._next_id("msg"), None, None, "in_progress"))
            data += self._written(delta.text)
        for call in begun:
            item = _call(f"fc_{self._id}_{call.index}", call.id, *self._named.get(call.name, (None, call.name)))
            data += self._open("call", item) + self._arguments(call)
        return data

    def _written(self, text: str) -> bytes:
        scores, self._held = self._held, []
        self._parts.append(text)
        self._scores += scores
        logprobs = _scored(scores)
        return self._event("response.output_text.delta", **self._at(), content_index=0, delta=text, logprobs=logprobs)

    def _arguments(self, call: ToolCallDelta) -> bytes:
        if not call.arguments:
            return b""
        self._parts.append(call.arguments)
        return self._event("response.function_call_arguments.delta", **self._at(), delta=call.arguments)

    def end(self, answer: Generation) -> bytes:
        status = _status(answer)
        data = self._close(status)
        if all(item["type"] == "reasoning" for item in self._output):
            item = _message(self._next_id("msg"), None, None, "in_progress")
            data += self._open("message", item) + self._close(status)
        self.response |= {"output": self._output, **_end_of(answer), "saccade": extension(answer)}
        return data + self._event(f"response.{self.response['status']}", response=self.response)

    def _cut_off(self) -> list[dict[str, Any]]:
        """The item that was being written when the answer failed, if any."""
        text = "".join(self._parts)
        if self._kind is None:
            return []
        if self._kind == "message":
            return [_message(self._item["id"], text, self._scores, "incomplete")]
        if self._kind == "reasoning":
            return [_reasoning(self._item["id"], text)]
        return [{**self._item, "arguments": text, "status": "incomplete"}]

    def error(self, error: dict[str, Any], status: int) -> bytes:
        failed = {"code": error["code"], "message": error["message"]}
        made = {**self.response, "output": [*self._output, *self._cut_off()], "status": "failed", "error": failed}
        return self._event("response.failed", response=made)
