"""The engine in this process, without a server."""

from __future__ import annotations

import _thread
import gc
import os
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from saccade._core.steps import Call
from saccade._transport.exchange import Exchange, Responses, UnaryCall
from saccade.errors import Cancelled, FailedPrecondition, SaccadeError, Unimplemented, error_from_service

INSTALL = "LocalClient runs the engine in this process, which needs the server's package: pip install saccade-server"


class LocalConnection:
    """Loads an engine in this process.

    Args:
        arguments: model, dtype, device and the options of `saccade serve`, with underscores.

    Raises:
        FailedPrecondition: the server's package is not installed.
        SaccadeError: the model cannot be loaded.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._arguments = arguments
        self.closed = False
        self._exchanges: weakref.WeakValueDictionary[int, Exchange] = weakref.WeakValueDictionary()
        self._left: weakref.finalize[..., LocalConnection] | None = None
        self._load()

    def _load(self) -> None:
        collecting = gc.isenabled()
        gc.disable()  # a fifth of the time that importing torch takes
        try:
            from service.servers.local import LocalService
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "service":
                raise
            raise FailedPrecondition(INSTALL, reason="NOT_INSTALLED") from error
        finally:
            if collecting:
                gc.enable()
        self._pid = os.getpid()
        with _translated(""):
            self.service = LocalService(**self._arguments)
        if self._left is not None:  # copied by a fork: the threads of that engine are the parent's
            self._left.detach()
        self._left = weakref.finalize(self, _end, self.service, self._pid)
        self._left.atexit = False

    def exchange(self) -> Exchange:
        made = Exchange(self)
        self._exchanges[id(made)] = made
        return made

    @property
    def alive(self) -> bool:
        """Whether the engine takes requests."""
        return not self.closed and bool(self.service.alive)

    def _engine(self) -> Any:
        if self.closed:
            raise FailedPrecondition("the client has been closed", reason="CLIENT_CLOSED")
        if self._pid != os.getpid():
            # Threads do not survive a fork, so the inherited engine has no thread that runs it.
            self._load()
        return self.service

    def begin(self, call: Call, timeout: float | None) -> UnaryCall:
        with self.ended_by_close(call.request_id), _translated(call.request_id):
            return _LocalCall(self, self._engine().begin(call.method, call.message, timeout), call.request_id)

    def open(self, call: Call, timeout: float | None, request_id: str) -> Responses:
        if call.method != "StreamGenerate":
            raise Unimplemented(f"{call.method} needs a server", reason="UNIMPLEMENTED")
        with self.ended_by_close(request_id), _translated(request_id):
            return _LocalResponses(self, self._engine().stream(call.message.request, timeout), request_id)

    @contextmanager
    def ended_by_close(self, request_id: str) -> Iterator[None]:
        """Turns any error of a call that `close` interrupted into Cancelled, as over gRPC."""
        running = not self.closed
        try:
            yield
        except SaccadeError as error:
            if running and self.closed:
                raise Cancelled("the client has been closed", request_id=request_id) from error
            raise

    def close(self) -> None:
        """Stops the engine and frees its memory. Idempotent."""
        if not self.closed:
            self.closed = True
            for found in self._exchanges.valuerefs():  # one may be between two attempts, without a call of the engine
                if (exchange := found()) is not None:
                    exchange.close()
            if self._left is not None:
                self._left.detach()
            if self._pid == os.getpid():
                self.service.close()


def _end(service: Any, pid: int) -> None:
    """Closes the engine of a client that was garbage-collected without `close`; nothing else would free its memory. It
    does so in a thread and does not wait for that thread's start either: the garbage collector may call this at any
    point of a program, for example while a lock is held."""
    if pid == os.getpid():
        closing = threading.Thread(target=service.close, name="saccade-close", daemon=True)
        _thread.start_new_thread(closing.start, ())


class _LocalCall:
    """One unary call to the engine."""

    def __init__(self, wire: LocalConnection, call: Any, request_id: str) -> None:
        self._wire, self._call, self._request_id = wire, call, request_id

    def result(self) -> Any:
        with self._wire.ended_by_close(self._request_id), _translated(self._request_id):
            return self._call.result()

    def cancel(self) -> None:
        self._call.cancel()


class _LocalResponses:
    """The messages of one streaming call to the engine."""

    def __init__(self, wire: LocalConnection, stream: Any, request_id: str) -> None:
        self._wire, self._stream, self._request_id = wire, stream, request_id

    def receive(self, patience: float | None) -> Any:
        if self._wire.closed:
            raise Cancelled("the client has been closed", request_id=self._request_id)
        with self._wire.ended_by_close(self._request_id), _translated(self._request_id):
            return self._stream.receive(patience)

    def close(self) -> None:
        self._stream.cancel()

    def __del__(self) -> None:
        # An unreferenced stream is cancelled, as over gRPC.
        self._stream.cancel()


class _translated:
    """Converts the service's status errors to the client's, as if received over gRPC."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or isinstance(error, SaccadeError):
            return
        from service.common.errors import StatusError

        if isinstance(error, StatusError):
            raise error_from_service(error, self.request_id) from error
