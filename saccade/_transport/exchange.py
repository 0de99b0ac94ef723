"""Executes one method of a synchronous client, from its first attempt to its last, through a `Wire`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from saccade._core.steps import Call
from saccade.errors import Cancelled, SaccadeError

T = TypeVar("T")


class UnaryCall(Protocol):
    """One attempt of a unary call. `cancel` may be called from any thread, at any time and repeatedly."""

    def result(self) -> Any:
        """The answer. Raises SaccadeError."""

    def cancel(self) -> None: ...


class Responses(Protocol):
    """The messages of one attempt of a streaming call. `close` cancels it and may be called from any thread, at any
    time and repeatedly."""

    def receive(self, patience: float | None) -> Any:
        """The next message, or None at the end. Raises SaccadeError, and TimeoutError after `patience` seconds."""

    def close(self) -> None: ...


class Wire(Protocol):
    """Makes one attempt: over gRPC, or by the engine in this process. All methods raise SaccadeError."""

    def begin(self, call: Call, timeout: float | None) -> UnaryCall: ...

    def open(self, call: Call, timeout: float | None, request_id: str) -> Responses: ...


class Exchange:
    """Executes the actions of one method. One thread uses it; any other may call `close`."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._closed = threading.Event()
        self._call: UnaryCall | None = None
        self._responses: Responses | None = None

    def send(self, call: Call, timeout: float | None) -> Any:
        self._check(call.request_id)
        attempt = self._call = self._wire.begin(call, timeout)
        if self._closed.is_set():
            attempt.cancel()  # `close` may have been called before the attempt existed
        try:
            return attempt.result()
        except SaccadeError:
            raise
        except BaseException:
            # For example a keyboard interrupt: the server should not finish an answer that nobody will receive.
            attempt.cancel()
            raise

    def open(self, call: Call, timeout: float | None, request_id: str) -> None:
        self._check(request_id)
        if self._responses is not None:
            self._responses.close()
        self._responses = self._wire.open(call, timeout, request_id)
        if self._closed.is_set():
            self._responses.close()

    def receive(self, patience: float | None) -> Any:
        assert self._responses is not None
        return self._responses.receive(patience)

    def wait(self, seconds: float) -> None:
        self._closed.wait(seconds)
        self._check("")

    def do(self, function: Callable[[], T], *, to_end: bool = False) -> T:
        return function()

    def _check(self, request_id: str) -> None:
        if self._closed.is_set():
            what = "call was cancelled" if self._responses is None else "stream has been closed"
            raise Cancelled(f"the {what}", request_id=request_id)

    def close(self) -> None:
        self._closed.set()
        if self._call is not None:
            self._call.cancel()
        if self._responses is not None:
            self._responses.close()
