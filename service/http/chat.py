"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from saccade._core.results import layouts_from
from saccade._openai.answers import completion, extension, logprobs_object, media_objects, usage_object
from saccade._openai.chat import chat_request
from saccade._openai.fields import PartFields, chat_rules, part_rules
from saccade._openai.problems import validated
from saccade._openai.schema import ChatCompletion, ImageUrlPart
from saccade.errors import InvalidArgument
from saccade.types import Delta, Generation
from saccade.v1 import inference_pb2, types_pb2
from service.http.call import HttpCall, beside
from service.http.chunks import DONE, ChunkEvents
from service.http.json_text import compact, quoted
from service.http.streams import stream_events, whole_answer


def no_paths(source: str | types_pb2.Image, name: str) -> types_pb2.Image:
    """Rejects paths: images of HTTP requests are in the request, uploaded, or at a URL that the gRPC server fetches.
    Raises InvalidArgument."""
    if isinstance(source, str):
        raise InvalidArgument(f"{name}: expected a data URL, media:ID or an https URL, got {source[:60]!r}")
    return source


async def chat_completions(call: HttpCall) -> None:
    """Answers a chat completion request, as a whole or as a stream of events."""
    body = validated(ChatCompletion, await call.json())
    call.fields = chat_rules({"max_completion_tokens": body.max_completion_tokens})
    request = await beside(call.held, build_chat, call, body)
    caller = call.caller()
    if ignored := _ignored(body):
        call.notes.append(("x-saccade-ignored", ", ".join(ignored)))
    if body.stream:
        await stream_events(call, caller, request, ChatEvents(call, body))
    else:
        answer = await whole_answer(call, caller, request)
        await call.respond({**completion(answer), "saccade": extension(answer)})


def _ignored(body: ChatCompletion) -> list[str]:
    """The fields of the request's messages that have no effect."""
    parts = [part for message in body.messages if isinstance(message.content, list) for part in message.content]
    found = ["detail"] if any(isinstance(part, ImageUrlPart) and part.image_url.detail for part in parts) else []
    return [*found, "name"] if any(message.name for message in body.messages) else found


def build_converted(call: HttpCall, made: tuple[ChatCompletion, PartFields]) -> inference_pb2.GenerateRequest:
    """The request for a chat completion that was made from another one, whose fields errors name."""
    body, parts = made
    call.fields = part_rules(parts, call.fields)
    return build_chat(call, body)


def build_chat(call: HttpCall, body: ChatCompletion) -> inference_pb2.GenerateRequest:
    request = chat_request(body, no_paths, request_id=call.request_id)
    if body.priority is None and call.priority is not None:
        request.priority = call.priority
    return request


async def prompt_tokens(call: HttpCall, made: Callable[[], tuple[ChatCompletion, PartFields]]) -> int:
    """The number of tokens of the prompt of a chat completion, which `made` makes from the request's body."""
    request = await beside(call.held, lambda: build_converted(call, made()))
    async with call.connected():
        asked = inference_pb2.TokenizeRequest(model=request.model, chat=request.chat)
        told = await call.caller().call("inference", "Tokenize", asked)
    return int(told.prompt_tokens)


def started_extension(started: inference_pb2.Started) -> dict[str, Any]:
    """The facts that are known before the first token, for clients that ask for usage."""
    return {
        "request_id": started.request_id,
        "prompt_tokens": started.prompt_tokens,
        "image_tokens": started.image_tokens,
        "video_tokens": started.video_tokens,
        "seed": started.seed,
        "media": media_objects(layouts_from(started.media)),
    }


class ChatEvents(ChunkEvents):
    """`chat.completion.chunk`s."""

    def __init__(self, call: HttpCall, body: ChatCompletion) -> None:
        super().__init__(f"chatcmpl-{call.request_id}", "chat.completion.chunk", body)
        self._n = body.n or 1
        self._roles = b""
        """The chunks that begin the samples. They are held back until the first token, because programs that measure
        latency would take them for it."""

    def begin(self, started: inference_pb2.Started) -> bytes:
        super().begin(started)
        self._roles = b"".join(
            self.choice(
                i, '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null',
                more=self.prompt_ids,
            )
            for i in range(self._n)
        )  # fmt: skip
        return self.without_choices(None, started_extension(started)) if self.usage_asked else b""

    def _after_roles(self, data: bytes) -> bytes:
        roles, self._roles = self._roles, b""
        return roles + data

    def piece(self, delta: Delta) -> bytes:
        self.count(delta)
        fields = []
        if delta.text or (delta.logprobs and not delta.reasoning):
            fields.append(f'"content":{quoted(delta.text)}')
        if delta.reasoning:
            thought = quoted(delta.reasoning)
            fields.append(f'"reasoning":{thought},"reasoning_content":{thought}')
        if calls := delta.tool_calls:
            fields.append(f'"tool_calls":{compact([_call_piece(call) for call in calls])}')
        if not fields and not (self.ids_asked and delta.token_ids):
            return self._after_roles(b"")
        logprobs = "null" if not delta.logprobs else compact(logprobs_object(delta.logprobs))
        return self._after_roles(self.choice(
            delta.index, f'"delta":{{{",".join(fields)}}},"logprobs":{logprobs},"finish_reason":null', delta.token_ids,
        ))  # fmt: skip

    def end(self, answer: Generation) -> bytes:
        chunks = []
        for sample in answer.samples:
            matched = compact(sample.stop_match)
            chunks.append(self.choice(
                sample.index,
                f'"delta":{{}},"logprobs":null,"finish_reason":{quoted(sample.finish_reason)},"stop_reason":{matched}',
            ))  # fmt: skip
        if self.usage_asked:
            usage = usage_object([sample.usage for sample in answer.samples])
            chunks.append(self.without_choices(usage, extension(answer)))
        return self._after_roles(b"".join([*chunks, DONE]))


def _call_piece(call: Any) -> dict[str, Any]:
    """A piece of a tool call; its id and name come with the first one."""
    function = {"name": call.name} if call.name else {}
    named = {"id": call.id, "type": "function"} if call.id else {}
    return {"index": call.index, **named, "function": {**function, "arguments": call.arguments}}
