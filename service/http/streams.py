"""Answers as a whole or as server-sent events, independent of the API's format."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeAlias

from saccade._core.results import generation_from
from saccade._openai.errors import error_object
from saccade.errors import SaccadeError
from saccade.types import Delta, Generation, ToolCallDelta
from saccade.v1 import inference_pb2
from service.http.call import HttpCall, http_status
from service.http.json_text import compact
from service.http.upstream import CONCURRENT, Caller, all_of

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


Asked: TypeAlias = tuple[inference_pb2.GenerateRequest, Events]
"""A request, and what writes its answer."""


def calls_of(delta: Delta) -> tuple[list[ToolCallDelta], list[ToolCallDelta]]:
    """The continuation of a call from an earlier piece, which comes before this piece's text, and the calls that begin
    here."""
    return [call for call in delta.tool_calls if not call.name], [call for call in delta.tool_calls if call.name]


def named_event(kind: str, **fields: Any) -> bytes:
    """A server-sent event whose name is also the `type` of its data, as in Anthropic's API and OpenAI's responses."""
    return f"event: {kind}\ndata: {compact({'type': kind, **fields})}\n\n".encode("utf-8", "replace")


async def stream_events(call: HttpCall, caller: Caller, request: inference_pb2.GenerateRequest, events: Events) -> None:
    """Sends an answer as server-sent events. Raises SaccadeError only before the first event."""

    async def ask(index: int) -> Asked:
        return request, events

    async with call.connected():
        await stream_several(call, caller, ask, 1)


async def stream_several(call: HttpCall, caller: Caller, ask: Callable[[int], Awaitable[Asked]], count: int) -> None:
    """Sends the answers to `count` requests as one stream of events, their pieces in the order in which they arrive.
    Within `call.connected()`. `ask`: makes the request of an index. The first event waits until all requests that run
    at a time have been admitted. Raises SaccadeError only before it; after it, an error of any request ends the
    stream."""
    turn, begun = asyncio.Lock(), asyncio.Event()
    waiting = min(count, CONCURRENT)
    writer: Events  # of the latest request; writes an error

    async def write(data: bytes) -> None:
        async with turn:
            await call.write(data)

    async def one(index: int) -> None:
        nonlocal waiting, writer
        request, events = await ask(index)
        writer = events
        answer = caller.stream(request)
        try:
            started = await answer.start()
            if not begun.is_set():
                waiting -= 1
                if not waiting:
                    await call.start(200, "text/event-stream; charset=utf-8", SSE_HEADERS)
                    begun.set()
                await begun.wait()
            await write(events.begin(started))
            while (delta := await answer.read()) is not None:
                if data := events.piece(delta):
                    await write(data)
            await write(events.end(answer.state.assembler.finish()))
        finally:
            answer.close()

    call.front.streams += 1
    try:
        await all_of(one, range(count))
    except SaccadeError as error:
        if not call.started:
            raise
        error.request_id = error.request_id or call.request_id
        call.status = http_status(error)
        await call.write(writer.error(error_object(error, call.status, call.fields), call.status))
    finally:
        call.front.streams -= 1
    await call.end()


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
