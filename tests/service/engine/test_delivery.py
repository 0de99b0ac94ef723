"""Events are delivered in order and none is lost; only further tokens wait, and only for the interval."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.engine.delivery import INTERVAL, UNSTREAMED_INTERVAL, Delivery
from service.engine.types import EngineEvent

FIRST = EngineEvent("a", 1, scheduled=0.5)
TOKEN = EngineEvent("a", 2)
END = EngineEvent("a", 3, finish_reason="stop")

events = st.sampled_from([FIRST, TOKEN, TOKEN, TOKEN, END, EngineEvent("a", 4, -0.5)])
steps = st.lists(st.tuples(st.floats(0, 2 * INTERVAL), st.lists(events, min_size=1, max_size=3)), max_size=20)


class Recorded:
    """A `Delivery` at a time that the test sets, and what it has delivered."""

    def __init__(self) -> None:
        self.now, self.deliveries = 0.0, list[list[EngineEvent]]()
        self.delivery = Delivery(self.deliveries.append, lambda: self.now)

    def put(self, after: float, *events: EngineEvent) -> int:
        """Number of events delivered, `after` seconds after the last call."""
        before = len(self.deliveries)
        self.now += after
        self.delivery.put(list(events))
        return sum(map(len, self.deliveries[before:]))


def test_tokens_of_short_steps_share_a_delivery() -> None:
    recorded = Recorded()
    assert recorded.put(1.0, TOKEN) == 1
    assert recorded.put(0.4 * INTERVAL, TOKEN) == 0
    assert recorded.put(0.4 * INTERVAL, TOKEN) == 0
    assert recorded.put(0.4 * INTERVAL, TOKEN) == 3
    assert recorded.put(1.1 * INTERVAL, TOKEN) == 1


def test_tokens_wait_longer_while_nobody_needs_them() -> None:
    recorded = Recorded()
    recorded.delivery.streamed = streamed = set[str]()
    assert recorded.put(1.0, TOKEN) == 1
    assert recorded.put(0.9 * UNSTREAMED_INTERVAL, TOKEN) == 0
    assert recorded.put(0.2 * UNSTREAMED_INTERVAL, TOKEN) == 2
    assert recorded.put(0.5 * UNSTREAMED_INTERVAL, TOKEN) == 0
    streamed.add("b")
    assert recorded.put(0.0, TOKEN) == 2


@pytest.mark.parametrize(
    "event",
    [
        FIRST,
        END,
        EngineEvent("a", finish_reason="error", error="died"),
        EngineEvent("a", 5, -0.25),
        EngineEvent("a", embedded=(b"", b""), finish_reason="length"),
        EngineEvent("a", 6, prompt_scores=((1, None, ()),)),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_other_events_do_not_wait_and_follow_what_waits(event: EngineEvent) -> None:
    recorded = Recorded()
    recorded.put(1.0, TOKEN)
    assert recorded.put(0.1 * INTERVAL, TOKEN) == 0
    assert recorded.put(0.1 * INTERVAL, event, TOKEN) == 3
    assert recorded.deliveries[-1] == [TOKEN, event, TOKEN]


@given(steps)
def test_all_events_are_delivered_in_order(steps: list[tuple[float, list[EngineEvent]]]) -> None:
    recorded = Recorded()
    for after, events in steps:
        recorded.put(after, *events)
    recorded.delivery.flush()
    recorded.delivery.flush()
    assert [e for events in recorded.deliveries for e in events] == [e for _, events in steps for e in events]
    assert all(recorded.deliveries)
