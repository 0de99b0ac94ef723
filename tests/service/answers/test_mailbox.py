"""Events are kept in order and none is lost; ends are delivered at once, tokens after at most the pace."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from service.answers.mailbox import Mailbox
from service.engine import wire
from service.engine.types import EngineEvent


def token(number: int, name: str = "a") -> EngineEvent:
    return EngineEvent(name, number)


def due_in(seconds: float) -> Callable[[], float]:
    """A pace whose next multiple is so many seconds after a take, on the running loop's clock."""
    loop = asyncio.get_running_loop()
    return lambda: loop.time() + seconds


def test_tokens_share_a_message_while_the_pace_lasts() -> None:
    async def scenario() -> list[list[int | None]]:
        mail = Mailbox(due_in(0.05))
        mail.put(token(1))
        taken = [await mail.take()]  # the first event does not wait
        taking = asyncio.create_task(mail.take())
        for number in (2, 3, 4):
            mail.put(token(number))
        taken.append(await taking)
        return [[event.token_id for event in events] for events in taken]

    assert asyncio.run(scenario()) == [[1], [2, 3, 4]]


def test_tokens_wait_for_the_pace() -> None:
    async def scenario() -> bool:
        mail = Mailbox(due_in(3600))
        mail.put(token(1))
        await mail.take()
        taking = asyncio.create_task(mail.take())
        for number in (2, 3, 4):
            await asyncio.sleep(0)
            mail.put(token(number))
        await asyncio.sleep(0)
        waits = not taking.done()
        taking.cancel()
        return waits

    assert asyncio.run(scenario())


def test_streams_of_one_pace_are_served_together() -> None:
    async def scenario() -> bool:
        due = due_in(0.5)()  # later than both of the first takes, also on a busy machine
        first, second = Mailbox(lambda: due), Mailbox(lambda: due)
        for mail in (first, second):  # at different times
            mail.put(token(1))
            await mail.take()
            await asyncio.sleep(0.001)
        takes = [asyncio.create_task(mail.take()) for mail in (first, second)]
        await asyncio.sleep(0)
        first.put(token(2))
        second.put(token(2))
        await takes[0]
        await asyncio.sleep(0)
        return takes[1].done()

    assert asyncio.run(scenario())


def test_an_end_is_not_held_back() -> None:
    async def scenario() -> int:
        mail = Mailbox(lambda: 3600.0)
        mail.put(token(1))
        await mail.take()
        taking = asyncio.create_task(mail.take())
        await asyncio.sleep(0)
        mail.put(token(2))
        mail.put(EngineEvent("a", 3, finish_reason="stop"))
        count = len(await taking)
        mail.put(EngineEvent("b", finish_reason="error", error="died"))
        return count + len(await mail.take())

    assert asyncio.run(asyncio.wait_for(scenario(), 60)) == 3


def test_a_cancelled_take_loses_nothing() -> None:
    async def scenario() -> int:
        mail = Mailbox(lambda: 0.01)
        mail.put(token(1))
        await mail.take()
        mail.put(token(2))
        taking = asyncio.create_task(mail.take())
        await asyncio.sleep(0)
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        return len(await mail.take())

    assert asyncio.run(scenario()) == 1


def test_events_cross_as_they_are() -> None:
    events = [
        token(1), token(2), EngineEvent("b", 3, cached_tokens=7), EngineEvent("c", 4, -0.5, ((4, -0.5),)),
        EngineEvent("a", 5, finish_reason="stop", stop_token=5),
        EngineEvent("d", finish_reason="error", error="internal", message="x"),
        EngineEvent("e", finish_reason="length", embedded=(b"1234",)), EngineEvent("f", 6, scheduled=2.5),
        EngineEvent("f", 7),
    ]  # fmt: skip
    back = wire.unpack_events(wire.pack_events(events))
    for name in "abcdef":
        assert [e for e in back if e.request_id == name] == [e for e in events if e.request_id == name]
