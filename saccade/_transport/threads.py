"""gRPC in the calling threads."""

from __future__ import annotations

import atexit
import functools
import os
import threading
import weakref
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from saccade._core.settings import Settings
from saccade._core.steps import Call
from saccade._transport.channel import (
    Messages,
    channel_credentials,
    channel_options,
    left_to_the_parent,
    stub_class,
)
from saccade._transport.exchange import Exchange, Responses, UnaryCall
from saccade._transport.watchdog import Watchdog
from saccade.errors import Cancelled, FailedPrecondition, error_from_rpc

if TYPE_CHECKING:
    import grpc


@functools.cache
def _leave_calls_at_exit() -> None:
    """Keeps gRPC from cancelling calls that are deleted while Python ends. For that it takes a call's lock, which one
    of its own threads, stopped at any place by then, may hold: the process would never end."""
    from grpc import _channel

    atexit.register(setattr, _channel._Rendezvous, "__del__", lambda call: None)


class Connection:
    """A channel and its stubs, made at the first call. Threads may share it; after a fork the child makes a new
    channel."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        # Reentrant: the garbage collector may run a finalizer that closes the client while this thread holds the lock.
        self._lock = threading.RLock()
        self._channel: grpc.Channel | None = None
        self._stubs: dict[str, Any] = {}
        self._exchanges: weakref.WeakSet[Exchange] = weakref.WeakSet()
        self._pid = os.getpid()
        self._closed = False

    def exchange(self) -> Exchange:
        made = Exchange(self)
        with self._lock_of_this_process():
            self._exchanges.add(made)
        return made

    def begin(self, call: Call, timeout: float | None) -> UnaryCall:
        messages = Messages(call.message()) if callable(call.message) else None
        return _GrpcCall(self._start(call, messages or call.message, timeout, future=True), call.request_id, messages)

    def open(self, call: Call, timeout: float | None, request_id: str) -> Responses:
        return _GrpcResponses(self._start(call, call.message, timeout, future=False), request_id)

    def _start(self, call: Call, message: Any, timeout: float | None, *, future: bool) -> Any:
        method = getattr(self._stub(call.service), call.method)
        try:
            return (method.future if future else method)(
                message, timeout=timeout, metadata=self._settings.call_metadata(call)
            )
        except ValueError as error:
            # gRPC raises ValueError if another thread has closed the channel in between.
            raise FailedPrecondition("the client has been closed", reason="CLIENT_CLOSED") from error

    def _stub(self, service: str) -> Any:
        with self._lock_of_this_process():
            if self._closed:
                raise FailedPrecondition("the client has been closed", reason="CLIENT_CLOSED")
            if service not in self._stubs:
                self._stubs[service] = stub_class(service)(self._connected())
            return self._stubs[service]

    def _connected(self) -> grpc.Channel:
        if self._channel is None:
            import grpc

            _leave_calls_at_exit()
            options = channel_options(self._settings)
            if self._settings.tls is None:
                self._channel = grpc.insecure_channel(self._settings.address, options)
            else:
                credentials = channel_credentials(self._settings.tls)
                self._channel = grpc.secure_channel(self._settings.address, credentials, options)
        return self._channel

    def _lock_of_this_process(self) -> AbstractContextManager[Any]:
        if self._pid != os.getpid():
            # A fork copied this object, possibly with its lock held by a thread of the parent.
            self._pid = os.getpid()
            self._lock = threading.RLock()
            left_to_the_parent.append((self._channel, self._stubs))
            self._channel, self._stubs, self._exchanges = None, {}, weakref.WeakSet()
        return self._lock

    def close(self) -> None:
        """Closes the channel; calls in flight end as Cancelled. Idempotent."""
        with self._lock_of_this_process():
            channel, self._channel = self._channel, None
            self._stubs = {}
            self._closed = True
            exchanges = list(self._exchanges)
        for exchange in exchanges:  # one may be between two attempts, when gRPC has no call of it
            exchange.close()
        if channel is not None:
            channel.close()


class _GrpcCall:
    """One attempt of a unary call."""

    def __init__(self, call: Any, request_id: str, messages: Messages | None) -> None:
        self._call = call
        self._request_id = request_id
        self._messages = messages

    def result(self) -> Any:
        import grpc

        try:
            return self._call.result()
        except grpc.RpcError as rpc_error:
            if self._messages is not None and self._messages.error is not None:
                raise self._messages.error from None
            error = error_from_rpc(rpc_error, request_id=self._request_id)
            raise error from rpc_error
        except grpc.FutureCancelledError:
            raise Cancelled("the call was cancelled", request_id=self._request_id) from None

    def cancel(self) -> None:
        self._call.cancel()


class _GrpcResponses:
    """The messages of one attempt of a streaming call."""

    def __init__(self, call: Any, request_id: str) -> None:
        self._call = call
        self._request_id = request_id
        self._watchdog: Watchdog | None = None

    def receive(self, patience: float | None) -> Any:
        import grpc

        watchdog = self._watchdog
        if patience is not None:
            watchdog = self._watchdog = watchdog or Watchdog(self._call)
            watchdog.arm(patience)
        try:
            return next(self._call)
        except StopIteration:
            return None
        except grpc.RpcError as rpc_error:
            if watchdog is not None and watchdog.expired:
                raise TimeoutError from rpc_error
            error = error_from_rpc(rpc_error, request_id=self._request_id)
            raise error from rpc_error
        finally:
            if watchdog is not None:
                watchdog.disarm()

    def close(self) -> None:
        self._call.cancel()
        if self._watchdog is not None:
            self._watchdog.stop()
