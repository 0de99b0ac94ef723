"""Calls that end while a thread still works for them release the resources that the thread has acquired."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import pytest

from service.rpc.servicer import in_thread


@pytest.mark.parametrize("cancellations", [1, 2])  # by the client, and by a server that stops
def test_what_was_entered_is_left_where_the_call_ends_in_the_middle(cancellations: int) -> None:
    entering, go_on = threading.Event(), threading.Event()
    steps: list[str] = []

    @contextlib.contextmanager
    def reserved() -> Iterator[None]:
        entering.set()
        assert go_on.wait(60)
        steps.append("reserved")
        yield
        steps.append("released")

    async def call() -> None:
        async with in_thread(reserved()):
            raise AssertionError("it had ended by then")

    async def body() -> None:
        task = asyncio.create_task(call())
        assert await asyncio.to_thread(entering.wait, 60)
        for _ in range(cancellations):
            task.cancel()
            await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(body())
    assert steps == ["reserved", "released"]
