"""The `Door` as a gRPC interceptor: a call's metadata are its headers, and a `StatusError` becomes a gRPC status.

All methods are registered as methods with a stream of requests, which makes no difference in gRPC's protocol: gRPC
would otherwise read a message before it calls the handler. Messages are parsed here, because gRPC would answer a
malformed one with UNKNOWN and the parser's own text. gRPC reports the size of a message only when all of it has
arrived.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from service.answers.door import Admitted, Door
from service.answers.weigh import LIGHT, weigh
from service.common import errors
from service.common.http_requests import HOLD
from service.rpc.http_requests import is_accepted
from service.rpc.statuses import abort

# Probes have no key, and must work while everything else is rejected. The HTTP process holds requests open before it
# passes on their keys.
OPEN_SERVICES = ("/grpc.health.v1.Health/", HOLD)
OPEN_BYTES, OPEN_SECONDS = 1024, 5.0
"""Largest message of their methods, and the time that it may take to arrive. It is not counted in the budget, which
callers without a key could fill with messages that never end. A Watch of the health service keeps its message until it
ends."""


class DoorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """The server's one interceptor."""

    def __init__(self, door: Door) -> None:
        self._door = door

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        if details.method.startswith(OPEN_SERVICES):
            return _open(handler)
        method, headers = details.method, dict(details.invocation_metadata or ())

        @contextlib.asynccontextmanager
        async def admitted(context: Any) -> AsyncIterator[_Messages]:
            try:
                with self._door.admit(method, headers) as call:
                    call.info.expires(context.time_remaining())
                    call.info.accepted = is_accepted(headers, context)
                    yield _Messages(handler, call)
            except errors.StatusError as error:
                await abort(context, error)

        async def unary(source: Any, context: Any) -> Any:
            async with admitted(context) as messages:
                return await messages.unary(source, context)

        async def stream(source: Any, context: Any) -> None:
            async with admitted(context) as messages:
                await messages.stream(source, context)

        return _as_streams(handler, unary, stream)


def _as_streams(handler: Any, unary: Any, stream: Any) -> Any:
    """A handler of raw messages with the body `unary` or `stream`, depending on whether it answers with a stream."""
    serializer = handler.response_serializer
    if handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(stream, response_serializer=serializer)
    return grpc.stream_unary_rpc_method_handler(unary, response_serializer=serializer)


def _open(handler: Any) -> Any:
    """A handler for methods that need no key and take one small message. They are neither counted nor logged."""

    async def request(source: Any, context: Any) -> Any:
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                data = await _given(anext(source, None))
            if len(data) > OPEN_BYTES:
                raise errors.InvalidArgument(
                    f"the message has {len(data)} bytes; at most {OPEN_BYTES} are allowed", reason="MESSAGE_TOO_LARGE"
                )
            return handler.request_deserializer(data)
        except (errors.StatusError, DecodeError, TimeoutError) as error:
            await abort(context, errors.to_status(error))

    async def unary(source: Any, context: Any) -> Any:
        return await handler.unary_unary(await request(source, context), context)

    async def stream(source: Any, context: Any) -> None:
        await handler.unary_stream(await request(source, context), context)

    return _as_streams(handler, unary, stream)


async def _given(message: Awaitable[bytes | None]) -> bytes:
    """The message of a method that takes one. Raises InvalidArgument if there is none."""
    if (data := await message) is None:
        raise errors.InvalidArgument("the call ended without a message", reason="MALFORMED_MESSAGE")
    return data


@dataclass
class _Messages:
    """The messages of one call. Methods raise StatusError, and the handler's exceptions."""

    handler: Any
    call: Admitted

    async def unary(self, source: AsyncIterator[bytes], context: Any) -> Any:
        method = self.handler.stream_unary if self.handler.request_streaming else self.handler.unary_unary
        return await method(await self._requests(source), context)

    async def stream(self, source: AsyncIterator[bytes], context: Any) -> None:
        method = self.handler.stream_stream if self.handler.request_streaming else self.handler.unary_stream
        try:
            await self.call.send(method(await self._requests(source), context), context.write)
        except grpc.aio.InternalError as error:
            # gRPC's core takes no more messages of a call that the client has just cancelled, and the cancellation has
            # not arrived here yet.
            raise asyncio.CancelledError from error

    async def _requests(self, source: AsyncIterator[bytes]) -> Any:
        """The parsed request, or an iterator over the parsed requests of a stream."""
        if self.handler.request_streaming:
            return self._each(source)
        message = self.call.arrival(anext(source, None), seconds=self.call.limits.receive_timeout)
        return await self._parsed(await _given(message))

    async def _each(self, source: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        while (data := await self._next(source)) is not None:
            request = await self._parsed(data)
            # A stream's messages are consumed one by one; the consumer counts what it keeps of them.
            self.call.dropped(len(data))
            yield request

    async def _next(self, source: AsyncIterator[bytes]) -> bytes | None:
        """The next request of a stream. An upload holds reserved space, so the length of its pauses is limited; other
        streams may pause, and only their number is limited."""
        if self.handler.response_streaming:
            return await anext(source, None)
        return await self.call.arrival(anext(source, None), seconds=self.call.limits.stall_timeout)

    async def _parsed(self, data: bytes) -> Any:
        self.call.received(len(data))
        parse = self.handler.request_deserializer
        if len(data) >= LIGHT:
            await asyncio.to_thread(weigh, data, parse.__self__.DESCRIPTOR, self.call.limits.max_ids)
        request = parse(data)
        info = self.call.info
        info.request_id = info.request_id or _request_id(request) or info.given_id
        return request


def _request_id(request: Any) -> str:
    value = getattr(request, "request_id", None)
    if value is None and (inner := getattr(request, "request", None)) is not None:
        value = getattr(inner, "request_id", None)
    return value[:128] if isinstance(value, str) else ""
