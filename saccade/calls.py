"""Calls of the synchronous clients over all their attempts. Each attempt is one of a client's own calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Protocol, Self

from saccade._core.resuming import StreamState
from saccade._core.retrying import Deadline, Retries
from saccade._core.settings import CallSettings
from saccade._core.steps import Call, Steps, drive
from saccade.errors import Cancelled, SaccadeError
from saccade.types import Delta, Generation
from saccade.v1 import inference_pb2


class UnaryCall(Protocol):
    """One attempt of a call with one answer. `cancel` may be called from any thread, at any time and more than once."""

    def result(self) -> Any:
        """The answer. Raises SaccadeError."""

    def cancel(self) -> None: ...


class Responses(Protocol):
    """The messages of one attempt of a stream. `close` may be called from any thread, at any time and more than once;
    it cancels."""

    def receive(self, patience: float | None) -> inference_pb2.StreamGenerateResponse | None:
        """The next message, or None at the end. Raises SaccadeError, and TimeoutError after `patience` seconds."""

    def close(self) -> None: ...


class Attempts:
    """A method's calls, one after the other, each over all its attempts. `cancel` may be called from any thread."""

    def __init__(
        self,
        begin: Callable[[Call, float | None], UnaryCall],
        steps: Steps[Any],
        calls: CallSettings,
        deadline: Deadline,
    ) -> None:
        self._begin = begin
        self._steps = steps
        self._max_retries = calls.max_retries
        self._deadline = deadline
        self._cancelled = threading.Event()
        self._call: UnaryCall | None = None

    def result(self) -> Any:
        """What the steps end in. Raises SaccadeError."""
        return drive(self._steps, self._made)

    def _made(self, call: Call) -> Any:
        retries = Retries(self._max_retries, self._deadline, registers=bool(call.request_id))
        while True:
            if self._cancelled.is_set():
                raise Cancelled("the call was cancelled", request_id=call.request_id)
            attempt = self._call = self._begin(call, self._deadline.left())
            if self._cancelled.is_set():
                attempt.cancel()  # `cancel` may have come before there was anything for it to cancel
            try:
                return attempt.result()
            except SaccadeError as caught:
                error = call.judged(caught)
            except BaseException:
                # An interrupt from the keyboard, say: the server need not finish what nobody waits for.
                attempt.cancel()
                raise
            self._cancelled.wait(retries.delay_after(error))

    def cancel(self) -> None:
        self._cancelled.set()
        if self._call is not None:
            self._call.cancel()


class Stream(Iterator[Delta]):
    """An answer as it is written.

    Iterating gives its deltas; `final()` reads the rest and gives the whole. As a context manager it cancels the work
    on the server on leaving, unless the answer is complete; so does `close()`, which another thread may call too.

    A stream that breaks because the server or its engine went away is continued with what it already has, so that the
    answer is the one that it would have been, unless `resume=False` or the client's max_retries is 0. One that
    failed for good raises its error again whenever it is read.
    """

    def __init__(
        self,
        state: StreamState,
        start: Callable[[inference_pb2.GenerateRequest, float | None], Responses],
        run: Callable[[Steps[None]], None] | None = None,
    ) -> None:
        """`run` makes the calls that a recovery takes; without it there is none."""
        self._state = state
        self._start = start
        self._run = run
        self._closed = threading.Event()
        self._generation: Generation | None = None
        # Open from the start, so that the server works while the caller gets ready to read.
        self._responses = start(state.request, state.deadline.remaining())

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        if self._state.failure is not None:
            raise self._state.failure
        if self._closed.is_set():
            raise StopIteration
        try:
            while (response := self._receive()) is not None:
                delta = self._state.take(response)
                if delta is not None:
                    return delta
        except BaseException as error:
            if not self._closed.is_set():
                self._state.failed(error)
            self.close()
            raise
        self.close()
        self._generation = self._state.assembler.finish()
        raise StopIteration

    def _receive(self) -> inference_pb2.StreamGenerateResponse | None:
        """The next message of this attempt or of the next one; None at the end."""
        while True:
            began = time.monotonic()
            try:
                return self._responses.receive(self._state.patience())
            except TimeoutError:
                raise self._state.out_of_patience() from None
            except SaccadeError as caught:
                error = caught
            finally:
                self._state.waited(time.monotonic() - began)
            if self._state.assembler.complete:
                return None  # the answer is whole; only the end of the call was lost
            if self._closed.is_set():
                raise error from error.__cause__
            recovery = self._state.recovery(error) if self._run is not None else None
            if self._run is not None and recovery is not None:
                self._run(recovery)
            else:
                delay = self._state.delay_after(error)
                self._closed.wait(delay)
                self._state.waited(delay)
            if self._closed.is_set():
                raise Cancelled("the stream has been closed", request_id=self.request_id)
            self._responses.close()
            self._responses = self._start(self._state.next_request(), self._state.deadline.remaining())
            if self._closed.is_set():
                self._responses.close()

    @property
    def request_id(self) -> str:
        return self._state.request.request_id

    @property
    def text(self) -> str:
        """The first sample's text so far."""
        return self._state.assembler.text()

    @property
    def token_ids(self) -> list[int]:
        """The first sample's token ids so far."""
        return self._state.assembler.token_ids()

    @property
    def seed(self) -> int | None:
        """The seed in use, once the stream's first message has come."""
        return self._state.seed

    def final(self) -> Generation:
        """Reads the stream to its end and returns the whole answer.

        Raises:
            Cancelled: the stream was closed before its end.
            SaccadeError: it failed; the same error each time it is asked.
        """
        for _ in self:
            pass
        if self._generation is None:
            raise Cancelled("the stream was closed before its end", request_id=self.request_id)
        return self._generation

    def close(self) -> None:
        """Cancels what is still running; what has come so far stays readable."""
        self._closed.set()
        self._responses.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
