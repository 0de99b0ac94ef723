# Generated from saccade/_async/ports.py by `make sdk`. Do not edit.
"""What the façade needs of a transport."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from saccade._core.steps import Call


class Exchange(Protocol):
    """Carries out the actions of one method, from its first attempt to its last; see `saccade._core.steps`."""

    def send(self, call: Call, timeout: float | None) -> Any: ...

    def open(self, call: Call, timeout: float | None, request_id: str) -> None: ...

    def receive(self, patience: float | None) -> Any: ...

    def wait(self, seconds: float) -> None: ...

    def do(self, function: Callable[[], Any]) -> Any: ...

    def close(self) -> None:
        """Cancels what is running, at any time and more than once; what comes after it is Cancelled."""


class Connection(Protocol):
    """What carries the calls of a client and its copies."""

    def exchange(self) -> Exchange:
        """For one method."""

    def close(self) -> None:
        """Ends it; calls that are still running end as Cancelled. Idempotent."""
