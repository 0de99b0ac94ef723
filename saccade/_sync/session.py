# Generated from saccade/_async/session.py by `make sdk`. Do not edit.
"""A connection with settings for its calls: the base of all clients."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from saccade._core.retrying import Deadline
from saccade._core.settings import CallSettings
from saccade._core.steps import Steps, with_retries
from saccade._sync.driver import run
from saccade._sync.ports import Connection, Exchange
from saccade.errors import FailedPrecondition

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from saccade._core.settings import CallOptions

T = TypeVar("T")


class Session:
    """A context manager; `close` can be called any number of times."""

    _closed = False
    _is_copy = False

    def __init__(self, connection: Connection, calls: CallSettings) -> None:
        self._connection = connection
        self._calls = calls

    def with_options(self, **options: Unpack[CallOptions]) -> Self:
        """A copy of the client with other settings for its calls: timeout, max_retries, first_token_timeout,
        idle_timeout, upload_above. It shares the original's connection or engine, which stays open when the copy is
        closed."""
        copy = type(self).__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy._calls = self._calls.changed(**options)
        copy._is_copy, copy._closed = True, False
        return copy

    def _exchange(self) -> Exchange:
        if self._closed:
            raise FailedPrecondition("the client has been closed", reason="CLIENT_CLOSED")
        return self._connection.exchange()

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline(self._calls.timeout if timeout is None else timeout)

    def _run(self, steps: Steps[T], timeout: float | None, exchange: Exchange | None = None) -> T:
        actions = with_retries(steps, self._calls.max_retries, self._deadline(timeout))
        return run(actions, exchange or self._exchange())

    def close(self) -> None:
        """Closes the connection; calls in flight end as Cancelled. Idempotent."""
        self._closed = True
        if not self._is_copy:
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
