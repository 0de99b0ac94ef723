"""Answers as a whole or as server-sent events, independent of the API's format."""

from __future__ import annotations

from typing import Any, Protocol

from saccade._core.results import generation_from
from saccade._openai.errors import error_object
from saccade.errors import SaccadeError
from saccade.types import Delta, Generation, ToolCallDelta
from saccade.v1 import inference_pb2
from service.http.call import HttpCall, http_status
from service.http.json_text import compact
from service.http.upstream import Answer, Caller

SSE_HEADERS = [("cache-control", "no-cache"), ("x-accel-buffering", "no")]


async def whole_answer(call: HttpCall, caller: Caller, request: inference_pb2.GenerateRequest) -> Generation:
    """The complete answer. Raises SaccadeError, and ClientGone if the client disconnects first."""
    async with call.connected():
        response = await caller.call("inference", "Generate", request)
    return generation_from(response, request.sampling)


class Events(Protocol):
    """The server-sent events of one streamed answer, as bytes, in one API's format."""

    def begin(self, started: inference_pb2.Started) -> bytes:
        """The events before the first token."""

    def piece(self, delta: Delta) -> bytes:
        """The events of a part of a sample; may be empty."""

    def end(self, answer: Generation) -> bytes:
        """The last events, for the whole answer."""

    def error(self, error: dict[str, Any], status: int) -> bytes:
        """The last events of an answer that failed; `status` is the HTTP status of the error."""


def calls_of(delta: Delta) -> tuple[list[ToolCallDelta], list[ToolCallDelta]]:
    """The continuation of a call from an earlier piece, which comes before this piece's text, and the calls that begin
    here."""
    return [call for call in delta.tool_calls if not call.name], [call for call in delta.tool_calls if call.name]


def named_event(kind: str, **fields: Any) -> bytes:
    """A server-sent event whose name is also the `type` of its data, as in Anthropic's API and OpenAI's responses."""
    return f"event: {kind}\ndata: {compact({'type': kind, **fields})}\n\n".encode("utf-8", "replace")


async def stream_events(call: HttpCall, caller: Caller, request: inference_pb2.GenerateRequest, events: Events) -> None:
    """Sends an answer as server-sent events. Raises SaccadeError only before the first event."""
    answer = caller.stream(request)
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


async def read_events(call: HttpCall, caller: Caller, request: inference_pb2.GenerateRequest, events: Events) -> None:
    """Passes an answer to `events` without sending anything. Raises SaccadeError, and ClientGone if the client
    disconnects first."""
    answer = caller.stream(request)
    try:
        async with call.connected():
            events.begin(await answer.start())
            while (delta := await answer.read()) is not None:
                events.piece(delta)
            events.end(answer.state.assembler.finish())
    finally:
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
        data = events.error(error_object(error, call.status, call.fields), call.status)
    await call.write(data)
