"""The limit on pixels in memory: in order, never exceeded, and nothing lost by requests that stop waiting."""

from __future__ import annotations

import asyncio
import random

import pytest

from service.media.gate import ByteGate


def test_in_order_and_never_above_the_bound() -> None:
    async def run() -> None:
        gate = ByteGate(10)
        order: list[int] = []

        async def one(number: int, size: int) -> None:
            grant = await gate.acquire(size)
            assert gate.used <= 10
            order.append(number)
            await asyncio.sleep(0)
            grant.shrink(1)
            await asyncio.sleep(0)
            grant.release()
            grant.release()

        sizes = [6, 6, 1, 30, 3, 10]
        await asyncio.gather(*[one(number, size) for number, size in enumerate(sizes)])
        assert order == list(range(len(sizes))), "a large one is not starved by small ones"
        assert gate.used == 0

    asyncio.run(run())


def test_a_request_without_bytes_does_not_wait() -> None:
    async def run() -> None:
        gate = ByteGate(10)
        held = await gate.acquire(10)
        waiting = asyncio.create_task(gate.acquire(1))
        await asyncio.sleep(0)
        (await gate.acquire(0)).release()
        assert not waiting.done() and gate.used == 10
        held.release()
        (await waiting).release()
        assert gate.used == 0

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(20))
def test_a_request_that_stops_waiting_leaves_nothing(seed: int) -> None:
    async def run() -> None:
        rng = random.Random(seed)
        gate = ByteGate(8)

        async def one() -> None:
            grant = await gate.acquire(rng.randint(0, 12))
            try:
                for _ in range(rng.randint(0, 3)):
                    await asyncio.sleep(0)
            finally:
                grant.release()

        tasks = [asyncio.create_task(one()) for _ in range(30)]
        for _ in range(20):
            await asyncio.sleep(0)
            rng.choice(tasks).cancel()
            assert 0 <= gate.used <= 8
        await asyncio.gather(*tasks, return_exceptions=True)
        assert gate.used == 0 and not gate._waiting

    asyncio.run(run())
