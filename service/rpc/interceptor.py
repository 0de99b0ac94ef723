"""What happens around every call, in this order:

    before its message is read   API key -> tenant, scope, request rate, a place among its calls; a refusal costs the
                                 server no buffer
    while it is read             bounded in time; one that takes long is counted with the largest size it may have,
                                 because gRPC tells the size of a message only once all of it is there
    with the message             bytes counted against the budget and the key's rate, parsed here
    around the method            every exception becomes the status that service/common/errors.py has for it
    at the end                   metrics, one line in the log, bytes given back

gRPC gets handlers whose requests are streams, also for methods that take one message, which look the same on the wire:
it would otherwise read a message before it calls the handler. And messages are parsed here, because gRPC answers a
malformed one with UNKNOWN and the parser's own words.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from service.answers.calls import AccessLog
from service.answers.weigh import LIGHT, MIN_IDS, weigh
from service.common import errors
from service.common.auth import Guard
from service.common.limits import ByteBudget, Held, Places
from service.telemetry.call_context import CallInfo, set_current_call
from service.telemetry.tracing import from_metadata

if TYPE_CHECKING:
    from service.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

# Probes have no key, and must hold while everything else is refused.
OPEN_SERVICES = ("/grpc.health.v1.Health/",)
QUICK_SECONDS = 2.0
"""In which nearly every message arrives. From then on it counts with the largest size that it may have."""


@dataclass(frozen=True)
class DoorLimits:
    """Bounds on each call, in seconds and bytes, and on how many calls one tenant may have."""

    stall_timeout: float
    """That one message of a stream may wait for its reader, and an upload for its next."""
    receive_timeout: float
    """That the message of a call may take."""
    max_message_bytes: int
    max_tenant_calls: int
    max_ids: int = MIN_IDS
    """Numbers in one list of a message."""


class FrontDoor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """The server's one interceptor."""

    def __init__(
        self, guard: Guard, budget: ByteBudget, metrics: Metrics, access: AccessLog, limits: DoorLimits
    ) -> None:
        self._guard, self._budget, self._metrics, self._access = guard, budget, metrics, access
        self._limits = limits
        self._places = Places(limits.max_tenant_calls, "calls")

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        reader = _Reader(handler, self._budget, self._limits)
        if details.method.startswith(OPEN_SERVICES):
            return reader.unguarded()
        metadata = dict(details.invocation_metadata or ())
        call = _Call(handler, CallInfo(details.method, trace=from_metadata(metadata)), reader)

        async def unary(source: Any, context: Any) -> Any:
            with self._recorded(call.info):
                async with self._admitted(call.info, metadata, context) as add:
                    return await call.unary(source, context, add)

        async def stream(source: Any, context: Any) -> None:
            with self._recorded(call.info):
                async with self._admitted(call.info, metadata, context) as add:
                    await call.stream(source, context, add)

        return _as_streams(handler, unary, stream)

    @contextlib.asynccontextmanager
    async def _admitted(self, info: CallInfo, metadata: dict[str, Any], context: Any) -> AsyncIterator[Held]:
        """Lets the call in, and ends it with the status of whatever is raised, a refusal among others."""
        try:
            info.tenant = self._guard.admit(info.method, metadata)
            with self._places.hold(info.tenant.name), self._budget.hold(info.tenant.name) as add:
                info.hold_bytes = add
                yield add
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # each becomes a status
            await _abort(context, info, error)

    @contextlib.contextmanager
    def _recorded(self, info: CallInfo) -> Iterator[None]:
        set_current_call(info)
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            info.code = grpc.StatusCode.CANCELLED.name
            raise
        finally:
            self._metrics.call(info.method, info.code, info.request_bytes)
            if info.generations == 0:
                self._access.write(info, seconds=time.monotonic() - info.started)


def _as_streams(handler: Any, unary: Any, stream: Any) -> Any:
    """A handler of raw messages with one of the two bodies, by what it answers."""
    serializer = handler.response_serializer
    if handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(stream, response_serializer=serializer)
    return grpc.stream_unary_rpc_method_handler(unary, response_serializer=serializer)


@dataclass
class _Reader:
    """Receives the messages of one call."""

    handler: Any
    budget: ByteBudget
    limits: DoorLimits

    async def message(self, source: AsyncIterator[bytes], add: Callable[[int], None], seconds: float) -> bytes | None:
        """The next one, None at the end of the stream. Raises DeadlineExceeded after `seconds`, and what `add` raises
        where there is no room for one that is long in coming."""
        held, refusal = 0, None

        def count() -> None:
            nonlocal held, refusal
            size = min(self.limits.max_message_bytes, self.budget.limit)
            try:
                add(size)
                held = size
            except errors.StatusError as error:
                refusal = error
                bound.reschedule(0.0)

        timer = asyncio.get_running_loop().call_later(QUICK_SECONDS, count)
        try:
            async with asyncio.timeout(seconds) as bound:
                return await anext(source, None)
        except TimeoutError:
            raise refusal or errors.DeadlineExceeded(
                f"a message did not arrive within {seconds:g} s", reason="SLOW_WRITER"
            ) from None
        finally:
            timer.cancel()
            add(-held)

    async def only(self, source: AsyncIterator[bytes], add: Callable[[int], None]) -> bytes:
        """The message of a method that takes one. Raises StatusError."""
        data = await self.message(source, add, self.limits.receive_timeout)
        if data is None:
            raise errors.InvalidArgument("the call ended without a message", reason="MALFORMED_MESSAGE")
        return data

    async def next(self, source: AsyncIterator[bytes], add: Callable[[int], None]) -> bytes | None:
        """Of a stream of requests. An upload holds space that it has reserved: it may not pause for as long as it
        likes, as streams that answer may; those are bounded in number alone."""
        if self.handler.response_streaming:
            return await anext(source, None)
        return await self.message(source, add, self.limits.stall_timeout)

    def unguarded(self) -> Any:
        """A handler for whoever has no key, of methods that take one message."""

        async def request(source: Any, context: Any) -> Any:
            try:
                with self.budget.hold() as add:
                    return self.handler.request_deserializer(await self.only(source, add))
            except (errors.StatusError, DecodeError) as error:
                await _abort(context, CallInfo(), error)

        async def unary(source: Any, context: Any) -> Any:
            return await self.handler.unary_unary(await request(source, context), context)

        async def stream(source: Any, context: Any) -> None:
            await self.handler.unary_stream(await request(source, context), context)

        return _as_streams(self.handler, unary, stream)


@dataclass
class _Call:
    """One call on its way through its handler."""

    handler: Any
    info: CallInfo
    reader: _Reader

    async def unary(self, source: Any, context: Any, add: Callable[[int], None]) -> Any:
        method = self.handler.stream_unary if self.handler.request_streaming else self.handler.unary_unary
        return await method(await self._requests(source, add), context)

    async def stream(self, source: Any, context: Any, add: Held) -> None:
        method = self.handler.stream_stream if self.handler.request_streaming else self.handler.unary_stream
        # aclosing: the engine must hear of a call's end at once, not when the garbage collector comes by
        async with contextlib.aclosing(method(await self._requests(source, add), context)) as responses:
            timeout = self.reader.limits.stall_timeout
            watch = _Stall(responses, timeout, add)
            async for response in responses:
                with watch:
                    await context.write(response)
                if watch.stalled:
                    raise errors.DeadlineExceeded(
                        f"a message of the answer was not read for {timeout:g} s", reason="SLOW_READER"
                    )

    async def _requests(self, source: Any, add: Callable[[int], None]) -> Any:
        """The parsed request, or an iterator of them."""
        if self.handler.request_streaming:
            return self._each(source, add)
        return await self._parsed(await self.reader.only(source, add), add)

    async def _parsed(self, data: bytes, add: Callable[[int], None]) -> Any:
        self.info.request_bytes += len(data)
        add(len(data))
        self.info.tenant.limits.admit("bytes", len(data))
        parse = self.handler.request_deserializer
        if len(data) >= LIGHT:
            await asyncio.to_thread(weigh, data, parse.__self__.DESCRIPTOR, self.reader.limits.max_ids)
        request = parse(data)
        self.info.request_id = self.info.request_id or _request_id(request)
        return request

    async def _each(self, source: AsyncIterator[bytes], add: Callable[[int], None]) -> AsyncIterator[Any]:
        while (data := await self.reader.next(source, add)) is not None:
            request = await self._parsed(data, add)
            # A stream's messages are consumed one by one: what they hold is counted by whoever keeps it.
            add(-len(data))
            yield request


class _Stall:
    """Watches over the writes of one stream. Where nobody reads for too long, what feeds the stream is closed, so that
    it holds nothing any more; the message that is stuck stays, because no status can overtake it."""

    def __init__(self, responses: Any, timeout: float, held: Held) -> None:
        """`held`: the call's share of the budget, given back as soon as its work is dropped."""
        self._responses, self._timeout, self._held = responses, timeout, held
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._closing: asyncio.Task[None] | None = None

    @property
    def stalled(self) -> bool:
        return self._closing is not None

    def __enter__(self) -> None:
        self._timer = self._loop.call_later(self._timeout, self._close)

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _close(self) -> None:
        log.warning("a stream's reader has not read for %g s: its work is dropped", self._timeout)
        self._closing = self._loop.create_task(self._drop())

    async def _drop(self) -> None:
        try:
            await self._responses.aclose()
        finally:
            self._held.release()


def _request_id(request: Any) -> str:
    value = getattr(request, "request_id", None)
    if value is None and (inner := getattr(request, "request", None)) is not None:
        value = getattr(inner, "request_id", None)
    return value[:128] if isinstance(value, str) else ""


async def _abort(context: Any, info: CallInfo, error: BaseException) -> None:
    """Ends the call with the status of `error`. Does not return."""
    status = errors.to_status(error)
    info.fail(status)
    # the one thing by which a client's complaint and the log can be brought together
    info.request_id = info.request_id or secrets.token_hex(8)
    if isinstance(status, errors.Internal):
        log.error("%s failed, request %s", info.method, info.request_id, exc_info=error)
    await context.abort(status.code, status.message, errors.trailers(status, info.request_id))
