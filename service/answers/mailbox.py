"""The engine's events for one call, until the call's task takes them.

Sending each token of many streams as a separate message costs more than generating it: on two cores, 32 streams would
use a third of the machine. So a task takes all available events at once, and then waits until the next multiple of
`pace` before it takes more. All streams with the same pace wake up at the same time, because separate wake-ups cost
nearly twice as much. First tokens, ends and errors are delivered without waiting.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from service.engine.types import EngineEvent

log = logging.getLogger(__name__)


class Mailbox:
    """Events of one call, on one event loop. One task takes them; `put` never blocks."""

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
        """Waits for events and returns all that have arrived, at least one. Can be cancelled without losing any."""
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


class Mailboxes:
    """Mailboxes by the engine's names of requests. Used on one event loop, except for `deliver`."""

    def __init__(self) -> None:
        self._by_name: dict[str, Mailbox] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Sets the event loop on which events are put into mailboxes."""
        self._loop = loop

    def add(self, names: Iterable[str], mail: Mailbox) -> None:
        self._by_name.update(dict.fromkeys(names, mail))

    def remove(self, name: str) -> None:
        """Removes a name; unknown names are ignored."""
        self._by_name.pop(name, None)

    def deliver(self, events: list[EngineEvent]) -> None:
        """Called on an engine thread: passes the events to the event loop, all at once. Those of unknown requests are
        dropped."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._dispatch, events)
        except RuntimeError:  # the loop is closed, so no call is waiting
            log.debug("%d events after the end of the loop", len(events))

    def _dispatch(self, events: list[EngineEvent]) -> None:
        for event in events:
            if (mail := self._by_name.get(event.request_id)) is not None:
                mail.put(event)
