"""Calls that end while a thread still works for them release the resources that the thread has acquired."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from service.rpc.servicer import in_thread, to_end


async def cancel_during(task: asyncio.Task[Any], entered: threading.Event, go_on: threading.Event, times: int) -> None:
    """Cancels a task so many times while its thread waits for `go_on`; the task ends as cancelled."""
    assert await asyncio.to_thread(entered.wait, 60)
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task


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
        await cancel_during(asyncio.create_task(call()), entering, go_on, cancellations)

    asyncio.run(body())
    assert steps == ["reserved", "released"]


def test_the_error_of_a_thread_whose_call_has_ended_is_not_logged() -> None:
    """As of an upload whose client disconnects: the commit finds that the file is not complete."""
    committing, go_on = threading.Event(), threading.Event()
    logged: list[Any] = []

    def commit() -> None:
        committing.set()
        assert go_on.wait(60)
        raise ValueError("the file is not complete")

    async def body() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: logged.append(context))
        task = asyncio.create_task(to_end(asyncio.get_running_loop().run_in_executor(None, commit)))
        await cancel_during(task, committing, go_on, 1)

    asyncio.run(body())
    gc.collect()
    assert logged == []
