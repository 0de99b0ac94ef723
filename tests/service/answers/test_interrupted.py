"""Calls that end while a thread still works for them: what it has taken is given back."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import pytest
from fake_engine import FakeEngine
from pictures import picture

from service.answers.bounds import FrontLimits
from service.answers.frontend import Frontend
from service.common.config import ServerOptions
from service.common.types import ChatInput, GenerateSpec, ImageSource, Message
from service.engine.types import EngineRequest
from service.rpc.servicer import in_thread
from service.servers.limits import load_assets


def test_what_was_entered_is_left_where_the_call_ends_in_the_middle() -> None:
    entering, go_on = threading.Event(), threading.Event()
    steps: list[str] = []

    @contextlib.contextmanager
    def reserved() -> Iterator[None]:
        entering.set()
        assert go_on.wait(60)
        steps.append("reserved")
        yield
        steps.append("given back")

    async def call() -> None:
        async with in_thread(reserved()):
            raise AssertionError("it had ended by then")

    async def body() -> None:
        task = asyncio.create_task(call())
        assert await asyncio.to_thread(entering.wait, 60)
        task.cancel()
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(body())
    assert steps == ["reserved", "given back"]


class SlowToTake(FakeEngine):
    """Takes a request when it is told to, and remembers the order of things."""

    def __init__(self) -> None:
        super().__init__(vocabulary=64)
        self.entered, self.go_on, self.aborted = threading.Event(), threading.Event(), threading.Event()
        self.seen: list[str] = []

    def submit(self, request: EngineRequest) -> None:
        self.entered.set()
        assert self.go_on.wait(60)
        self.seen.append("submit")

    def abort(self, request_id: str) -> None:
        self.seen.append("abort")
        if "submit" in self.seen:
            self.aborted.set()


def test_an_abort_does_not_go_ahead_of_its_request() -> None:
    engine = SlowToTake()
    parts = ChatInput((Message("user", (None, "?")),))
    spec = GenerateSpec("a", "", parts, (ImageSource(picture(1), "prompt.images[0]"),))

    async def body() -> None:
        front = Frontend(engine, load_assets(ServerOptions()), FrontLimits())
        front.start()
        try:
            task = asyncio.ensure_future(anext(front.stream(spec)))
            assert await asyncio.to_thread(engine.entered.wait, 60)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            engine.go_on.set()
            assert await asyncio.to_thread(engine.aborted.wait, 60)
        finally:
            engine.go_on.set()
            await asyncio.to_thread(front.close)

    asyncio.run(body())
    assert engine.seen[-2:] == ["submit", "abort"]
