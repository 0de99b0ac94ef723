"""gRPC in an asyncio event loop."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from typing import Any, Protocol, TypeVar

from saccade._core.settings import Settings
from saccade._core.steps import Call
from saccade._transport.channel import (
    Messages,
    channel_credentials,
    channel_options,
    left_to_the_parent,
    stub_class,
)
from saccade.errors import Cancelled, FailedPrecondition, error_from_rpc

T = TypeVar("T")


class Starting(Protocol):
    """What an exchange needs of a connection."""

    @property
    def closed(self) -> bool: ...

    def start(self, call: Call, message: Any, timeout: float | None) -> Any: ...

    def keep(self, pause: asyncio.Future[None]) -> None:
        """Cancels `pause` when the connection is closed."""


class AsyncExchange:
    """Executes the actions of one method. Any task of the loop may call `close`."""

    def __init__(self, connection: Starting) -> None:
        self._connection = connection
        self._closed = False
        self._call: Any = None
        self._pause: asyncio.Future[None] | None = None
        self._request_id = ""

    async def send(self, call: Call, timeout: float | None) -> Any:
        import grpc

        self._check(call.request_id)
        messages = Messages(call.message()) if callable(call.message) else None
        message = call.message if messages is None else _beside_the_loop(messages)
        started = self._connection.start(call, message, timeout)
        ended = None if messages is None else _ServersStatus(started)
        try:
            return await started
        except grpc.RpcError as rpc_error:
            if messages is not None and messages.error is not None:
                raise messages.error from None
            error = rpc_error if ended is None else ended.instead_of(rpc_error)
            raise error_from_rpc(error, request_id=call.request_id) from error
        except asyncio.CancelledError:
            if messages is not None and messages.error is not None and not _task_is_cancelled():
                raise messages.error from None
            if self._ended and not _task_is_cancelled():
                raise Cancelled("the client has been closed", request_id=call.request_id) from None
            raise

    async def open(self, call: Call, timeout: float | None, request_id: str) -> None:
        self._check(request_id)
        if self._call is not None:
            self._call.cancel()
        self._request_id = request_id
        self._call = self._connection.start(call, call.message, timeout)

    async def receive(self, patience: float | None) -> Any:
        import grpc

        try:
            response = await _within(self._call.read(), patience)
            return None if response is grpc.aio.EOF else response
        except asyncio.TimeoutError:  # differs from the built-in TimeoutError before Python 3.11
            raise TimeoutError from None
        except grpc.RpcError as rpc_error:
            raise error_from_rpc(rpc_error, request_id=self._request_id) from rpc_error
        except asyncio.CancelledError:
            # grpc.aio reports a call that `close` has cancelled like a cancelled task.
            if self._ended and not _task_is_cancelled():
                raise Cancelled("the stream has been closed", request_id=self._request_id) from None
            raise

    async def wait(self, seconds: float) -> None:
        self._pause = asyncio.ensure_future(asyncio.sleep(0 if self._ended else seconds))
        if not self._ended:
            self._connection.keep(self._pause)
        try:
            await self._pause
        except asyncio.CancelledError:
            if not self._ended or _task_is_cancelled():
                raise
        if self._ended:
            raise Cancelled("the call was cancelled between two attempts", request_id=self._request_id)

    async def do(self, function: Callable[[], T], *, to_end: bool = False) -> T:
        if not to_end:
            return await asyncio.to_thread(function)
        work = asyncio.ensure_future(asyncio.to_thread(function))
        cancelled: asyncio.CancelledError | None = None
        while not work.done():
            try:
                await asyncio.wait({work})
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            work.exception()  # else asyncio would report it as never retrieved
            raise cancelled
        return work.result()

    @property
    def _ended(self) -> bool:
        return self._closed or self._connection.closed

    def _check(self, request_id: str) -> None:
        if self._closed:
            what = "call was cancelled" if self._call is None else "stream has been closed"
            raise Cancelled(f"the {what}", request_id=request_id)

    def close(self) -> None:
        self._closed = True
        for running in (self._call, self._pause):
            if running is not None:
                running.cancel()


_WRITE_FAILED = "Internal error from Core"
"""Details of the status that grpc.aio sets if a message could not be written."""


class _ServersStatus:
    """Finds the status with which the server ended a call whose request is a stream.

    A server may end such a call before it has read all messages, for example if it has no space for a file. The write
    in progress then fails, and grpc.aio may replace the server's status by INTERNAL
    (https://github.com/grpc/grpc/issues/36066). A callback receives each status when it is set.
    """

    def __init__(self, call: Any) -> None:
        self._error: Any = None
        call.add_done_callback(self._note)

    def _note(self, call: Any) -> None:
        import grpc

        details = _result_of(call.details())
        if details != _WRITE_FAILED:
            code, trailers = _result_of(call.code()), _result_of(call.trailing_metadata())
            self._error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailers, details)

    def instead_of(self, error: Any) -> Any:
        """`error`, or the server's status if `error` comes from a failed write."""
        import grpc

        if error.details() != _WRITE_FAILED:
            return error
        if self._error is not None and self._error.code() != grpc.StatusCode.OK:
            return self._error
        # The server has ended the call and its status is lost: treated like a lost connection, which is retried.
        words = "the server ended the call before it had read the whole request, and its status was lost"
        return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), words)


def _result_of(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that returns without waiting."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    coroutine.close()
    raise AssertionError("the call has ended, so its status is known")


async def _within(result: Awaitable[T], seconds: float | None) -> T:
    return await (result if seconds is None else asyncio.wait_for(result, seconds))


async def _beside_the_loop(messages: Iterator[Any]) -> AsyncGenerator[Any, None]:
    """Reads the messages of a file in a thread."""
    while (message := await asyncio.to_thread(next, messages, None)) is not None:
        yield message


def _task_is_cancelled() -> bool:
    """Whether the current task is being cancelled. Always False on Python 3.10, which cannot tell."""
    task = asyncio.current_task()
    return task is not None and hasattr(task, "cancelling") and task.cancelling() > 0


class _Channel:
    """The channel and stubs of one event loop."""

    def __init__(self, settings: Settings) -> None:
        import grpc

        options = channel_options(settings)
        if settings.tls is None:
            self.channel = grpc.aio.insecure_channel(settings.address, options)
        else:
            self.channel = grpc.aio.secure_channel(settings.address, channel_credentials(settings.tls), options)
        self._stubs: dict[str, Any] = {}
        self._calls: weakref.WeakSet[Any] = weakref.WeakSet()

    def start(self, call: Call, message: Any, timeout: float | None, metadata: Any) -> Any:
        if call.service not in self._stubs:
            self._stubs[call.service] = stub_class(call.service)(self.channel)
        started = getattr(self._stubs[call.service], call.method)(message, timeout=timeout, metadata=metadata)
        self.keep(started)
        return started

    def keep(self, call: Any) -> None:
        """Cancels the call, or the pause between two attempts of one, when the channel is closed."""
        self._calls.add(call)

    @property
    def busy(self) -> bool:
        """Whether there is a call that has not ended."""
        return any(not call.done() for call in list(self._calls))

    async def close(self) -> None:
        """To be called in the channel's loop. Cancels all calls first: on some Python versions gRPC's own `close`
        leaves some of its calls running."""
        for call in list(self._calls):
            call.cancel()
        await self.channel.close()


class AsyncConnection:
    """One channel per event loop that uses it, made at the first call."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._channels: dict[asyncio.AbstractEventLoop, _Channel] = {}
        self._left: list[tuple[asyncio.AbstractEventLoop, _Channel]] = []
        """Channels with earlier settings."""
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self.closed = False

    def exchange(self) -> AsyncExchange:
        return AsyncExchange(self)

    def start(
        self, call: Call, message: Any, timeout: float | None, metadata: tuple[tuple[str, str], ...] | None = None
    ) -> Any:
        """Starts a call; returns gRPC's call object. Raises FailedPrecondition if the connection is closed.

        Args:
            metadata: replaces that of the settings, for calls on behalf of another client.
        """
        sent = self._settings.call_metadata(call) if metadata is None else metadata
        return self._channel().start(call, message, timeout, sent)

    def keep(self, pause: asyncio.Future[None]) -> None:
        self._channel().keep(pause)

    def renew(self, settings: Settings) -> None:
        """Uses other settings, such as renewed certificates, for calls that begin from now on. Calls that are running
        keep their channel."""
        with self._lock_of_this_process():
            self._left = [each for each in self._left if each[1].busy] + list(self._channels.items())
            self._channels, self._settings = {}, settings

    def grpc_channel(self) -> Any:
        """gRPC's channel of this event loop, for services that the client has no methods for."""
        return self._channel().channel

    def _channel(self) -> _Channel:
        if self.closed:
            raise FailedPrecondition("the client has been closed", reason="CLIENT_CLOSED")
        loop = asyncio.get_running_loop()
        with self._lock_of_this_process():
            channel = self._channels.get(loop)
            if channel is None:
                # Drops the channels of loops that have ended: an unreferenced channel closes itself.
                self._channels = {held: c for held, c in self._channels.items() if not held.is_closed()}
                channel = self._channels[loop] = _Channel(self._settings)
            return channel

    def _lock_of_this_process(self) -> threading.Lock:
        if self._pid != os.getpid():
            # A fork copied this object, possibly with its lock held by a thread of the parent.
            self._pid = os.getpid()
            self._lock = threading.Lock()
            left_to_the_parent.extend((self._channels, self._left))
            self._channels, self._left = {}, []
        return self._lock

    async def close(self) -> None:
        """Closes all channels; calls in flight end as Cancelled. Idempotent."""
        with self._lock_of_this_process():
            channels = [*self._channels.items(), *self._left]
            self._channels, self._left = {}, []
            self.closed = True
        here = asyncio.get_running_loop()
        for loop, channel in channels:
            if loop is here:
                await channel.close()
            elif loop.is_running():  # the loop runs in another thread
                asyncio.run_coroutine_threadsafe(channel.close(), loop)
