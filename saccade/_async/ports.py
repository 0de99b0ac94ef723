"""What the façade needs of a transport."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from saccade._core.steps import Call


class AsyncExchange(Protocol):
    """Carries out the actions of one method, from its first attempt to its last; see `saccade._core.steps`."""

    async def send(self, call: Call, timeout: float | None) -> Any: ...

    async def open(self, call: Call, timeout: float | None, request_id: str) -> None: ...

    async def receive(self, patience: float | None) -> Any: ...

    async def wait(self, seconds: float) -> None: ...

    async def do(self, function: Callable[[], Any]) -> Any: ...

    def close(self) -> None:
        """Cancels what is running, at any time and more than once; what comes after it is Cancelled."""


class AsyncConnection(Protocol):
    """What carries the calls of a client and its copies."""

    def exchange(self) -> AsyncExchange:
        """For one method."""

    async def close(self) -> None:
        """Ends it; calls that are still running end as Cancelled. Idempotent."""
