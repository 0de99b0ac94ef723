"""The client of an engine, without an engine: requests, queries and descriptors when the other end closes."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest

from decoder.request import PromptScore
from decoder.sampling import SamplingParams
from service.common.errors import EngineDied
from service.engine import wire
from service.engine.engine_client import EngineLink
from service.engine.types import EngineEvent, EngineRequest


class Far:
    """The other end of a link, and what the link has told."""

    def __init__(self) -> None:
        near, self.connection = Pipe()
        self.events: list[EngineEvent] = []
        self.deaths = 0
        self.dead = threading.Event()
        self.link = EngineLink(near, self._died)
        self.link.start(self.events.extend)

    def _died(self) -> None:
        self.deaths += 1
        self.dead.set()

    def send(self, *events: EngineEvent) -> None:
        self.connection.send(("events", wire.pack_events(list(events))))

    def end(self) -> None:
        self.connection.close()
        assert self.dead.wait(30)


@pytest.fixture
def far() -> Iterator[Far]:
    far = Far()
    yield far
    connection: Connection = far.connection
    if not connection.closed:
        far.end()


def request(name: str, *siblings: str) -> EngineRequest:
    return EngineRequest(name, [1, 2], SamplingParams(max_tokens=1), siblings=siblings)


def test_what_the_engine_held_when_it_died_is_told_once_and_nothing_else(far: Far) -> None:
    for name in ("done", "aborted", "running"):
        far.link.submit(request(name))
    far.link.submit(request("first", "second"))
    assert [far.connection.recv()[0] for _ in range(4)] == ["submit"] * 4
    far.send(EngineEvent("running", 5), EngineEvent("done", 6, finish_reason="length"))
    far.send(EngineEvent("first", finish_reason="error", error="invalid"))
    far.link.abort("aborted")
    assert far.connection.recv() == ("abort", "aborted")
    query = far.link.query("stats")
    assert far.connection.recv() == ("query", 0, "stats")
    far.end()
    told = [(e.request_id, e.finish_reason, e.error) for e in far.events if e.error == "died"]
    assert told == [("running", "error", "died"), ("second", "error", "died")] and far.deaths == 1
    assert [e.token_id for e in far.events if e.error is None] == [5, 6]
    with pytest.raises(EngineDied):
        query.result(30)


def test_what_comes_after_the_end_is_told_too(far: Far) -> None:
    far.end()
    told = threading.Event()
    far.link._emit = lambda events: (far.events.extend(events), told.set())  # type: ignore[assignment]
    far.link.submit(request("late", "later"))
    assert told.wait(30) and [(e.request_id, e.error) for e in far.events] == [("late", "died"), ("later", "died")]
    with pytest.raises(EngineDied):
        far.link.query("beat").result(30)
    assert far.deaths == 1


@pytest.mark.parametrize("message", [b"no pickle", pickle.dumps(("events", None))], ids=["unreadable", "wrong"])
def test_a_message_that_cannot_be_processed_ends_the_engine(far: Far, message: bytes) -> None:
    """Nothing would read its further messages, and nothing notice its end."""
    far.link.submit(request("a"))
    far.connection.send_bytes(message)
    assert far.dead.wait(30) and [(e.request_id, e.error) for e in far.events] == [("a", "died")]


def test_answers_find_their_questions(far: Far) -> None:
    first, second, third = (far.link.query("stats") for _ in range(3))
    numbers = [far.connection.recv()[1] for _ in range(3)]
    far.connection.send(("answer", numbers[1], {"live": 2}, None))
    far.connection.send(("answer", 999, {}, None))  # of no request
    far.connection.send(("answer", numbers[0], None, "AssertionError('leak')"))
    assert second.result(30) == {"live": 2} and not third.done()
    with pytest.raises(AssertionError, match="leak"):
        first.result(30)


def test_a_question_that_its_caller_drops_leaves_the_others(far: Far) -> None:
    """As when a client cancels its call while the engine is in a long step."""
    dropped, kept = far.link.query("stats"), far.link.query("stats")
    numbers = [far.connection.recv()[1] for _ in range(2)]
    dropped.cancel()
    for number in numbers:
        far.connection.send(("answer", number, {"live": number}, None))
    assert kept.result(30) == {"live": numbers[1]} and far.deaths == 0


def test_a_link_that_is_closed_has_not_died(far: Far) -> None:
    far.link._closing = True
    far.link.submit(request("a"))
    far.connection.recv()
    far.connection.close()
    reader: Any = far.link._reader
    reader.join(30)
    assert [e.error for e in far.events] == ["died"] and far.deaths == 0


def test_events_cross_whole_and_each_request_keeps_its_order() -> None:
    events = [
        EngineEvent("a", 1, cached_tokens=7), EngineEvent("b", 2, logprob=-0.5, top=((2, -0.5),)), EngineEvent("a", 3),
        EngineEvent("c", finish_reason="error", error="full", message="m"), EngineEvent("a", 4, finish_reason="stop"),
        EngineEvent("d", 0), EngineEvent("e", 5, embedded=(b"x",)),
        EngineEvent("f", 6, prompt_scores=(PromptScore(1, 8, -0.5, ()),)), EngineEvent("f", 7), EngineEvent("f", 8),
    ]  # fmt: skip
    back = wire.unpack_events(wire.pack_events(events))
    assert sorted(map(repr, back)) == sorted(map(repr, events))
    assert [e.token_id for e in back if e.request_id == "a"] == [1, 3, 4]
    assert [e.token_id for e in back if e.request_id == "f"] == [6, 7, 8]
