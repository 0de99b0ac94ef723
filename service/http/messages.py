"""`/v1/messages`, Anthropic's API."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain
from typing import Any, Literal

from saccade._openai.answers import extension
from saccade._openai.anthropic_schema import CountTokens, MessagesRequest, ToolResultBlock, chat_of
from saccade._openai.documents import finite
from saccade._openai.fields import MESSAGES
from saccade._openai.problems import validated
from saccade.errors import Unimplemented
from saccade.types import Delta, Generation, ToolCallDelta
from saccade.v1 import inference_pb2
from service.http.call import HttpCall, beside
from service.http.chat import build_converted, prompt_tokens
from service.http.streams import Events, calls_of, named_event, read_events, stream_events, whole_answer

_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


def anthropic_error(error: dict[str, Any], status: int) -> dict[str, Any]:
    """Anthropic's form of an error; `code` is the reason."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    told = {"type": kind, "message": error["message"], "code": error["code"]}
    return {"type": "error", "error": told, "request_id": error.get("request_id")}


def error_form_of(path: str) -> Callable[[dict[str, Any], int], dict[str, Any]] | None:
    """`HttpCall.error_form` for errors of a path that may be unknown."""
    return anthropic_error if path == "/v1/messages" or path.startswith("/v1/messages/") else None


def _without_threads(error: dict[str, Any], status: int) -> dict[str, Any]:
    """The error after which the loop of Anthropic's client over tools sends whole conversations."""
    made = anthropic_error(error, status)
    made["error"]["details"] = {"error_code": "thread_unsupported_request"}
    return made


def as_anthropic(call: HttpCall) -> None:
    """Gives the answer, or the error, the form and the headers that Anthropic's clients read."""
    call.error_form, call.fields = anthropic_error, MESSAGES
    call.notes.append(("request-id", call.request_id))


async def messages(call: HttpCall) -> None:
    """Answers a request of Anthropic's Messages API, as a whole or as a stream of events."""
    as_anthropic(call)
    body = validated(MessagesRequest, await call.json())
    if body.thread is not None:
        call.error_form = _without_threads
        raise Unimplemented("thread: nothing is stored; send the whole conversation, without thread")
    request = await beside(call.held, lambda: build_converted(call, chat_of(body)))
    given = chain.from_iterable(message.content for message in body.messages if isinstance(message.content, list))
    if any(isinstance(block, ToolResultBlock) and block.is_error for block in given):
        call.notes.append(("x-saccade-ignored", "is_error"))  # chat templates have no place for it
    # As Anthropic's API: an answer that reaches the end of the context says so, instead of an error beforehand.
    request.sampling.clamp_max_tokens = True
    omits = body.thinking is not None and body.thinking.display == "omitted"
    events = MessageEvents(call.request_id, body.max_tokens, omits)
    if body.stream:
        await stream_events(call, call.caller(), request, events)
        return
    if request.chat.tools:  # a whole answer does not say where its calls are in the text
        await read_events(call, call.caller(), request, events)
        await call.respond(events.message)
        return
    answer = await whole_answer(call, call.caller(), request)
    made = message_object(call.request_id, answer.model)
    ending = _ending(answer, body.max_tokens)
    blocks = blocks_of(answer.reasoning, answer.text, omits)
    made |= {"content": blocks, **ending, "usage": _usage(answer), "saccade": extension(answer)}
    await call.respond(made)


async def count_tokens(call: HttpCall) -> None:
    """The number of tokens that the prompt of a request takes."""
    as_anthropic(call)
    body = validated(CountTokens, await call.json())
    await call.respond({"input_tokens": await prompt_tokens(call, lambda: chat_of(body))})


def message_object(request_id: str, model: str) -> dict[str, Any]:
    """A message without content."""
    return {
        "id": f"msg_{request_id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 0, "output_tokens": 0},
    }


def blocks_of(reasoning: str, text: str, omits: bool = False) -> list[dict[str, Any]]:
    """The blocks of an answer without its calls. `omits`: the text of reasoning."""
    blocks: list[dict[str, Any]] = []
    if reasoning:
        blocks.append({"type": "thinking", "thinking": "" if omits else reasoning, "signature": ""})
    if text:
        blocks.append({"type": "text", "text": text})
    return blocks


def object_of(arguments: str) -> Any:
    """A call's arguments as an object. If they are not valid JSON, because the call was cut off or has a number like
    1e999, an object with their text."""
    try:
        return json.loads(arguments or "{}", parse_float=finite)
    except ValueError:
        return {"arguments": arguments}


def _ending(answer: Generation, max_tokens: int) -> dict[str, Any]:
    return ending_of(
        answer.finish_reason, answer.samples[0].stop_match, whole=answer.usage.completion_tokens >= max_tokens
    )


def ending_of(finish_reason: str, match: str | int | None, *, whole: bool) -> dict[str, Any]:
    """Why an answer has ended. `match`: what of the stop strings and tokens. `whole`: it has all tokens that were asked
    for, so that it was not the context that ended it."""
    stopped = match if isinstance(match, str) else None
    longest = "max_tokens" if whole else "model_context_window_exceeded"
    reasons = {"length": longest, "tool_calls": "tool_use", "aborted": "aborted"}
    reason = "stop_sequence" if stopped is not None else reasons.get(finish_reason, "end_turn")
    return {"stop_reason": reason, "stop_sequence": stopped}


def _usage(answer: Generation) -> dict[str, Any]:
    usage = answer.usage
    return input_usage(usage.prompt_tokens, usage.cached_tokens) | {"output_tokens": usage.completion_tokens}


def input_usage(prompt: int, cached: int) -> dict[str, Any]:
    """Anthropic's input tokens are those that were not read from a cache."""
    return {
        "input_tokens": prompt - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
    }


class MessageEvents(Events):
    """The events of a streamed message, which consists of consecutive blocks."""

    def __init__(self, request_id: str, max_tokens: int, omits: bool = False) -> None:
        """`omits`: the text of reasoning."""
        self._id, self._max_tokens, self._omits = request_id, max_tokens, omits
        self._kind: Literal["thinking", "text", "call"] | None = None
        """The kind of the block that is being written."""
        self._block: dict[str, Any] = {}
        self._parts: list[str] = []
        self._begun = False
        """Whether the message has begun. It begins with the first token: how much of the prompt was cached is not known
        before."""
        self.message: dict[str, Any] = {}
        """The message so far: its blocks that are complete; after `end`, the whole."""

    def begin(self, started: inference_pb2.Started) -> bytes:
        self.message = message_object(self._id, started.model)
        self.message["usage"] = input_usage(started.prompt_tokens, 0) | {"output_tokens": 0}
        return b""

    def _start(self, cached: int) -> bytes:
        if self._begun:
            return b""
        self._begun, usage = True, self.message["usage"]
        usage |= input_usage(usage["input_tokens"], cached)
        return named_event("message_start", message=self.message)

    @property
    def _index(self) -> int:
        """The index of the block that is being written, or of the next one."""
        return len(self.message["content"])

    def _open(self, kind: Literal["thinking", "text", "call"], block: dict[str, Any]) -> bytes:
        data = self._close()
        self._kind, self._block, self._parts = kind, block, []
        return data + named_event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> bytes:
        if self._kind is None:
            return b""
        text, data = "".join(self._parts), b""
        if self._kind == "thinking":  # without this event some clients do not send the block back
            data = self._delta("signature_delta", "signature", "")
        data += named_event("content_block_stop", index=self._index)
        written = {"input": object_of(text)} if self._kind == "call" else {self._kind: text}
        self.message["content"].append(self._block | written)
        self._kind = None
        return data

    def piece(self, delta: Delta) -> bytes:
        rest, begun = calls_of(delta)
        data = self._start(delta.cached_tokens) + b"".join(map(self._arguments, rest))
        if delta.reasoning:
            if self._kind != "thinking":
                data += self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            if not self._omits:
                data += self._delta("thinking_delta", "thinking", delta.reasoning)
        if delta.text:
            if self._kind != "text":
                data += self._open("text", {"type": "text", "text": ""})
            data += self._delta("text_delta", "text", delta.text)
        for called in begun:
            data += self._open("call", {"type": "tool_use", "id": called.id, "name": called.name, "input": {}})
            data += self._arguments(called)
        return data

    def _arguments(self, called: ToolCallDelta) -> bytes:
        if not called.arguments:
            return b""
        return self._delta("input_json_delta", "partial_json", called.arguments)

    def _delta(self, kind: str, name: str, text: str) -> bytes:
        self._parts.append(text)
        return named_event("content_block_delta", index=self._index, delta={"type": kind, name: text})

    def end(self, answer: Generation) -> bytes:
        ending = _ending(answer, self._max_tokens)
        more = {"usage": _usage(answer), "saccade": extension(answer)}
        data = self._start(answer.usage.cached_tokens) + self._close()
        self.message |= {**ending, **more}
        return data + named_event("message_delta", delta=ending, **more) + named_event("message_stop")

    def error(self, error: dict[str, Any], status: int) -> bytes:
        made = anthropic_error(error, status)
        del made["type"]
        return named_event("error", **made)
