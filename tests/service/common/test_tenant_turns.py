"""Places for which tenants take turns."""

from __future__ import annotations

import asyncio
import random

import pytest

from service.common.tenant_turns import TenantSemaphore


@pytest.mark.parametrize(
    ("places", "asking", "order"),
    [
        (1, "aaaabbc", ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]),
        (2, "aaaabbc", ["a1", "a2", "a3", "b1", "c1", "a4", "b2"]),
        (7, "aaaabbc", ["a1", "a2", "a3", "a4", "b1", "b2", "c1"]),
    ],
)
def test_tenants_take_turns(places: int, asking: str, order: list[str]) -> None:
    """And the first of a tenant's callers goes first."""
    served = list[str]()

    async def call(semaphore: TenantSemaphore, name: str) -> None:
        async with semaphore.hold(name[0].encode()):
            served.append(name)
            for _ in range(3):
                await asyncio.sleep(0)

    async def run() -> None:
        semaphore = TenantSemaphore(places)
        names = [f"{tenant}{asking[: index + 1].count(tenant)}" for index, tenant in enumerate(asking)]
        await asyncio.gather(*(call(semaphore, name) for name in names))

    asyncio.run(run())
    assert served == order


@pytest.mark.parametrize("seed", range(20))
def test_callers_that_are_cancelled_at_any_time_keep_no_place(seed: int) -> None:
    rng = random.Random(seed)
    places, holding, served = rng.randint(1, 3), set[int](), set[int]()

    async def call(semaphore: TenantSemaphore, index: int) -> None:
        async with semaphore.hold(bytes([index % 3])):
            holding.add(index)
            assert len(holding) <= places
            served.add(index)
            try:
                for _ in range(rng.randrange(4)):
                    await asyncio.sleep(0)
            finally:
                holding.remove(index)

    async def run() -> None:
        semaphore = TenantSemaphore(places)
        calls, cancelled = list[asyncio.Task[None]](), set[int]()
        for index in range(60):
            calls.append(asyncio.create_task(call(semaphore, index)))
            if rng.random() < 0.5:
                cancelled.add(chosen := rng.randrange(len(calls)))
                calls[chosen].cancel()
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(0)
        _, lost = await asyncio.wait(calls, timeout=20)
        assert not lost
        assert served | cancelled == set(range(60)) and not holding
        async with asyncio.timeout(10):  # all places are free again
            held = [semaphore.hold(b"later") for _ in range(places)]
            for place in held:
                await place.__aenter__()
            for place in held:
                await place.__aexit__(None, None, None)
        for done in calls:
            assert done.cancelled() or done.exception() is None

    asyncio.run(run())
