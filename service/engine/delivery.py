"""Decides when the engine's events are passed on: events of several short steps are passed on together.

Each delivery wakes threads of the frontend, and on a machine with few cores these take time from the next step: on two
cores a delivery takes up to a millisecond, a third of the step of a small quantised model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from service.engine.types import EngineEvent, EventSink

INTERVAL = 0.010
"""Minimum number of seconds between deliveries of further tokens. A token waits for less than this time plus one step.
That step is short as well: before a step with new work, which may be long, the engine delivers everything."""
UNSTREAMED_INTERVAL = 0.1
"""The same while no request needs its tokens before its end."""


def may_wait(event: EngineEvent) -> bool:
    """Whether an event is a plain token, and not the first one of its request."""
    return event.plain and event.scheduled is None


class Delivery:
    """Passes events on, in order. Used only by the engine's thread."""

    def __init__(self, sink: EventSink, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: the time in seconds."""
        self.sink, self._clock = sink, clock
        self.streamed: Collection[str] | None = None
        """The requests whose tokens are needed before the end of their answers. `None`: possibly all."""
        self._held: list[EngineEvent] = []
        self._delivered = float("-inf")

    def put(self, events: list[EngineEvent]) -> None:
        """Holds events if all are further tokens and the last delivery was less than an interval ago; otherwise
        delivers them, after those that were held."""
        self._held += events
        streams = self.streamed is None or bool(self.streamed)
        interval = INTERVAL if streams else UNSTREAMED_INTERVAL
        if self._clock() - self._delivered >= interval or not all(map(may_wait, events)):
            self.flush()

    def flush(self) -> None:
        """Delivers the events that are held."""
        if self._held:
            events, self._held = self._held, []
            self._delivered = self._clock()
            self.sink(events)
