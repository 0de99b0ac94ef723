"""What happens around every call, in this order:

    before its message is read   API key -> tenant, scope, request rate; a refusal costs the server no buffer
    with the message             bytes counted against the budget and the key's rate, parsed here
    around the method            every exception becomes the status that service/errors.py has for it
    at the end                   metrics, one line in the log, bytes given back

Messages are parsed here and not by gRPC, because gRPC answers a malformed one with UNKNOWN and the parser's own words.
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

from service import errors
from service.auth import Guard
from service.calls import AccessLog, CallInfo, set_current_call
from service.limits import ByteBudget
from service.tracing import from_metadata

if TYPE_CHECKING:
    from service.metrics import Metrics

log = logging.getLogger(__name__)

# Probes have no key, and must hold while everything else is refused.
OPEN_SERVICES = ("/grpc.health.v1.Health/",)


class FrontDoor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """The server's one interceptor."""

    def __init__(
        self, guard: Guard, budget: ByteBudget, metrics: Metrics, access: AccessLog, *, stall_timeout: float
    ) -> None:
        """`stall_timeout`: seconds that one message of a stream may wait for its reader, and an upload for its next."""
        self._guard, self._budget, self._metrics, self._access = guard, budget, metrics, access
        self._stall_timeout = stall_timeout

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        handler = await continuation(details)
        if handler is None or details.method.startswith(OPEN_SERVICES):
            return handler
        metadata = dict(details.invocation_metadata or ())
        info = CallInfo(details.method, trace=from_metadata(metadata))
        try:
            info.tenant = self._guard.admit(details.method, metadata)
        except errors.StatusError as error:
            return self._refusal(handler, info, error)
        return self._wrapped(handler, info)

    def _refusal(self, handler: Any, info: CallInfo, error: errors.StatusError) -> Any:
        """A handler that ends the call unread: gRPC asks for the message of a unary request before it calls the
        method, but not for those of a stream, and on the wire the two are the same."""

        async def refuse(_: Any, context: Any) -> None:
            with self._recorded(info):
                await _abort(context, info, error)

        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(refuse)
        return grpc.stream_unary_rpc_method_handler(refuse)

    def _wrapped(self, handler: Any, info: CallInfo) -> Any:
        call = _Call(handler, info, self._budget, self._stall_timeout)

        async def unary(source: Any, context: Any) -> Any:
            with self._recorded(info):
                return await call.unary(source, context)

        async def stream(source: Any, context: Any) -> None:
            with self._recorded(info):
                await call.stream(source, context)

        make, body = {
            (False, False): (grpc.unary_unary_rpc_method_handler, unary),
            (True, False): (grpc.stream_unary_rpc_method_handler, unary),
            (False, True): (grpc.unary_stream_rpc_method_handler, stream),
            (True, True): (grpc.stream_stream_rpc_method_handler, stream),
        }[handler.request_streaming, handler.response_streaming]
        return make(body, request_deserializer=None, response_serializer=handler.response_serializer)

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


@dataclass
class _Call:
    """One call on its way through its handler."""

    handler: Any
    info: CallInfo
    budget: ByteBudget
    stall_timeout: float

    async def unary(self, source: Any, context: Any) -> Any:
        with self.budget.hold() as add:
            self.info.hold_bytes = add
            try:
                method = self.handler.stream_unary if self.handler.request_streaming else self.handler.unary_unary
                return await method(self._requests(source, add), context)
            except grpc.aio.AbortError:
                raise
            except Exception as error:  # each becomes a status
                await _abort(context, self.info, error)

    async def stream(self, source: Any, context: Any) -> None:
        with self.budget.hold() as add:
            self.info.hold_bytes = add
            try:
                method = self.handler.stream_stream if self.handler.request_streaming else self.handler.unary_stream
                # aclosing: the engine must hear of a call's end at once, not when the garbage collector comes by
                async with contextlib.aclosing(method(self._requests(source, add), context)) as responses:
                    watch = _Stall(responses, self.stall_timeout)
                    async for response in responses:
                        with watch:
                            await context.write(response)
                        if watch.stalled:
                            raise errors.DeadlineExceeded(
                                f"a message of the answer was not read for {self.stall_timeout:g} s",
                                reason="SLOW_READER",
                            )
            except grpc.aio.AbortError:
                raise
            except Exception as error:  # each becomes a status
                await _abort(context, self.info, error)

    def _requests(self, source: Any, add: Callable[[int], None]) -> Any:
        """The parsed request, or an iterator of them."""
        return self._each(source, add) if self.handler.request_streaming else self._parsed(source, add)

    def _parsed(self, data: bytes, add: Callable[[int], None]) -> Any:
        self.info.request_bytes += len(data)
        add(len(data))
        self.info.tenant.limits.admit("bytes", len(data))
        request = self.handler.request_deserializer(data)
        self.info.request_id = self.info.request_id or _request_id(request)
        return request

    async def _each(self, source: AsyncIterator[bytes], add: Callable[[int], None]) -> AsyncIterator[Any]:
        while (data := await self._next(source)) is not None:
            request = self._parsed(data, add)
            # A stream's messages are consumed one by one: what they hold is counted by whoever keeps it.
            add(-len(data))
            yield request

    async def _next(self, source: AsyncIterator[bytes]) -> bytes | None:
        """None at the end. An upload holds space that it has reserved: it may not pause for as long as it likes, as
        streams that answer may.
        """
        try:
            async with asyncio.timeout(None if self.handler.response_streaming else self.stall_timeout):
                return await anext(source, None)
        except TimeoutError:
            raise errors.DeadlineExceeded(
                f"no message of the upload came for {self.stall_timeout:g} s", reason="SLOW_WRITER"
            ) from None


class _Stall:
    """Watches over the writes of one stream. Where nobody reads for too long, what feeds the stream is closed, so that
    it holds nothing any more; the message that is stuck stays, because no status can overtake it."""

    def __init__(self, responses: Any, timeout: float) -> None:
        self._responses, self._timeout = responses, timeout
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
        self._closing = self._loop.create_task(self._responses.aclose())


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
