"""Answers, whole or as server-sent events, whatever their format is."""

from __future__ import annotations

import hashlib
from json.encoder import encode_basestring
from typing import Any

from saccade._core.results import generation_from
from saccade._openai.errors import error_object
from saccade.errors import SaccadeError
from saccade.types import Delta, Generation
from saccade.v1 import inference_pb2
from service.http.call import HttpCall, http_status
from service.http.upstream import Answer, Caller

DONE = b"data: [DONE]\n\n"
SSE_HEADERS = [("cache-control", "no-cache"), ("x-accel-buffering", "no")]


def affinity_key(request: inference_pb2.GenerateRequest) -> bytes:
    """Equal for requests that share much of their prompt: of the first image, else of the prompt's beginning."""
    for message in request.chat.messages:
        for part in message.parts:
            if part.HasField("image"):
                return hashlib.blake2b(part.image.SerializeToString(), digest_size=16).digest()
    text = "".join(part.text for message in request.chat.messages[:1] for part in message.parts) or request.prompt.text
    return hashlib.blake2b(text[:1024].encode("utf-8", "replace"), digest_size=16).digest()


async def whole_answer(call: HttpCall, caller: Caller, request: inference_pb2.GenerateRequest) -> Generation:
    """The answer, unless the client goes away first. Raises SaccadeError and ClientGone."""
    async with call.connected():
        response = await caller.call("inference", "Generate", request, key=affinity_key(request))
    return generation_from(response, request.sampling.HasField("logprobs"))


class Events:
    """The events of one streamed answer, as bytes. Subclasses are the formats."""

    def begin(self, started: inference_pb2.Started) -> bytes:
        raise NotImplementedError

    def piece(self, delta: Delta) -> bytes:
        """May be empty."""
        raise NotImplementedError

    def end(self, answer: Generation) -> bytes:
        raise NotImplementedError

    def error(self, error: dict[str, Any]) -> bytes:
        """The answer broke off."""
        raise NotImplementedError


async def stream_events(call: HttpCall, caller: Caller, request: inference_pb2.GenerateRequest, events: Events) -> None:
    """Sends an answer as server-sent events. Raises SaccadeError only before the first."""
    answer = caller.stream(request, affinity_key(request))
    call.front.streams += 1
    try:
        async with call.connected():
            started = await answer.start()
            await call.start(200, "text/event-stream; charset=utf-8", SSE_HEADERS)
            await call.write(events.begin(started))
            await _pieces(call, answer, events)
        await call.end()
    finally:
        call.front.streams -= 1
        answer.close()


async def _pieces(call: HttpCall, answer: Answer, events: Events) -> None:
    try:
        while (delta := await answer.read()) is not None:
            if data := events.piece(delta):
                await call.write(data)
        data = events.end(answer.state.assembler.finish())
    except SaccadeError as error:
        error.request_id = error.request_id or call.request_id
        call.status = http_status(error)
        data = events.error(error_object(error, call.status))
    await call.write(data)


def quoted(text: str) -> str:
    """A JSON string."""
    return encode_basestring(text)
