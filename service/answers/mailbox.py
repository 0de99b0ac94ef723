"""The engine's events for one call, until the call's task takes them.

Sending each token of many streams as a separate message costs more than generating it: on two cores, 32 streams would
use a third of the machine. So a task takes all available events, and a stream that has just been served waits before it
is served again: until the next multiple of `pace`, which is the same time for all streams of this pace, since waking
up for each of them by itself costs nearly twice as much. First tokens, ends and errors are delivered at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from service.engine.types import EngineEvent


class Mailbox:
    """Events of one call, on one event loop. One task takes; `put` never blocks."""

    def __init__(self, pace: Callable[[], float] = lambda: 0.0) -> None:
        """`pace`: seconds between the times at which tokens are delivered; 0 delivers each at once."""
        self._pace = pace
        self._events: list[EngineEvent] = []
        self._due = 0.0
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def put(self, event: EngineEvent) -> None:
        self._events.append(event)
        if self._waiter is None:
            return
        loop = self._waiter.get_loop()
        if event.finish_reason is not None or event.error is not None or loop.time() >= self._due:
            self._wake()
        elif self._timer is None:
            self._timer = loop.call_at(self._due, self._wake)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[EngineEvent]:
        """All events that have come, at least one. Can be cancelled without losing any."""
        loop = asyncio.get_running_loop()
        if not any(event.finish_reason is not None for event in self._events):
            self._waiter = loop.create_future()
            if self._events:
                self._timer = loop.call_at(self._due, self._wake)
            try:
                await self._waiter
            finally:
                self._waiter = None
                if self._timer is not None:
                    self._timer.cancel()
                    self._timer = None
        events, self._events = self._events, []
        now, pace = loop.time(), self._pace()
        self._due = (now // pace + 1) * pace if pace else now
        return events
