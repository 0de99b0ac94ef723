# Generated from saccade/_async/ports.py by `make sdk`. Do not edit.
"""The interface between the façade and a transport."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from saccade._core.steps import Call


class Exchange(Protocol):
    """Executes the actions of one method over all its attempts; see `saccade._core.steps`."""

    def send(self, call: Call, timeout: float | None) -> Any: ...

    def open(self, call: Call, timeout: float | None, request_id: str) -> None: ...

    def receive(self, patience: float | None) -> Any: ...

    def wait(self, seconds: float) -> None: ...

    def do(self, function: Callable[[], Any], *, to_end: bool = False) -> Any:
        """The function's result. `to_end`: a cancellation takes effect when the function has returned, because it uses
        what the caller releases then: a write to a closed file would be one to whatever has its descriptor. Otherwise
        it takes effect at once, since reading a pipe, for example, may take forever."""

    def close(self) -> None:
        """Cancels what is running; further actions raise Cancelled. Can be called at any time and more than once."""


class Connection(Protocol):
    """Executes the calls of a client and of its copies."""

    def exchange(self) -> Exchange:
        """An exchange for one method."""

    def close(self) -> None:
        """Closes the connection; calls in flight end as Cancelled. Idempotent."""
