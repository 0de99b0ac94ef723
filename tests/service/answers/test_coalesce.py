"""Coalescing changes how an answer is divided into deltas, and nothing else."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator

import pytest
from counting import lines_run
from hypothesis import given
from hypothesis import strategies as st

from service.answers.coalesce import coalesce
from service.common.types import Delta, Event, Finished, Started, Usage

USAGE = Usage(1, 0, 0, 0, 0.0, 0.0)
START = Started("r", 1, 0, "m", "v", 0)


def delta(index: int, sequence: int, count: int = 1) -> Delta:
    return Delta(index, f"<{index}.{sequence}>", tuple(range(count)), (), sequence, f"[{index}.{sequence}]")


async def collect(events: AsyncGenerator[Event, None]) -> list[Event]:
    return [event async for event in events]


async def replay(events: list[Event], *, error: Exception | None = None) -> AsyncGenerator[Event, None]:
    for event in events:
        yield event
        await asyncio.sleep(0)
    if error is not None:
        raise error


@given(st.integers(1, 3), st.integers(0, 40), st.integers(1, 9), st.booleans(), st.integers(0, 1000))
def test_every_answer_is_the_same_in_larger_pieces(n: int, count: int, chunk: int, delayed: bool, seed: int) -> None:
    rng = random.Random(seed)
    sequences, events = [0] * n, [START]
    for _ in range(count):
        index = rng.randrange(n)
        events.append(delta(index, sequences[index], rng.randint(0, 3)))
        sequences[index] += 1
    events += [Finished(i, "stop", USAGE) for i in range(n)]
    out = asyncio.run(collect(coalesce(replay(events), chunk_tokens=chunk, max_delay=60.0 if delayed else None)))
    assert out[0] == START
    for index in range(n):
        before = [e for e in events if isinstance(e, Delta) and e.index == index]
        after = [e for e in out if isinstance(e, Delta) and e.index == index]
        assert "".join(d.text for d in after) == "".join(d.text for d in before)
        assert "".join(d.reasoning for d in after) == "".join(d.reasoning for d in before)
        assert [i for d in after for i in d.token_ids] == [i for d in before for i in d.token_ids]
        assert [d.sequence for d in after] == list(range(len(after)))
        assert all(len(d.token_ids) >= chunk for d in after[:-1])
        ends = [i for i, e in enumerate(out) if isinstance(e, Finished) and e.index == index]
        assert len(ends) == 1 and all(out.index(d) < ends[0] for d in after)


def test_the_delay_lets_go_of_what_is_held() -> None:
    async def slow() -> AsyncGenerator[Event, None]:
        yield delta(0, 0)
        await asyncio.Event().wait()

    async def first() -> Event:
        merged = coalesce(slow(), chunk_tokens=100, max_delay=0.01)
        event = await anext(merged)
        await merged.aclose()
        return event

    assert asyncio.run(asyncio.wait_for(first(), 30)) == delta(0, 0)


def test_an_error_comes_after_what_was_held() -> None:
    async def run() -> list[Event]:
        out: list[Event] = []
        with pytest.raises(ConnectionError):
            async for event in coalesce(
                replay([START, delta(0, 0)], error=ConnectionError()), chunk_tokens=9, max_delay=None
            ):
                out.append(event)
        return out

    assert asyncio.run(run()) == [START, delta(0, 0)]


def test_closing_it_closes_what_is_behind_it() -> None:
    closed = []

    async def endless() -> AsyncGenerator[Event, None]:
        try:
            yield delta(0, 0)
            await asyncio.Event().wait()
        finally:
            closed.append(True)

    async def run() -> None:
        merged = coalesce(endless(), chunk_tokens=1, max_delay=None)
        await anext(merged)
        await merged.aclose()

    asyncio.run(run())
    assert closed == [True]


def test_the_work_grows_with_the_number_of_deltas_that_are_held() -> None:
    """A client may ask for chunks of any size."""

    def cost(count: int) -> int:
        events: list[Event] = [delta(0, sequence) for sequence in range(count)]
        return lines_run(lambda: asyncio.run(collect(coalesce(replay(events), chunk_tokens=10**6, max_delay=None))))

    few, many = cost(50), cost(500)
    assert many < 15 * few, f"{few} lines for 50 deltas, {many} for 500"
