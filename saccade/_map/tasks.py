"""Runs many requests in asyncio tasks, at most a given number at a time. The counterpart of `threads`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from saccade._core.results import generation_from
from saccade._map.feeding import End, Fed, Feeder, Item, Shared
from saccade._map.window import Event, Finished, Prepare, Result, Window
from saccade.types import Generation
from saccade.v1 import inference_pb2

T = TypeVar("T")


class AsyncAnswers(Protocol):
    """The part of a client that `map_requests_async` needs."""

    async def _generate(
        self, request: inference_pb2.GenerateRequest, timeout: float | None
    ) -> inference_pb2.GenerateResponse: ...


class _Source:
    """Reads the source of an asyncio map: an asynchronous source in a task, others in a thread, since they may block.
    It reads one item at a time and delivers it in the event loop."""

    def __init__(self, items: Iterable[Any] | AsyncIterable[Any], deliver: Callable[[Fed], None]) -> None:
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._asked = asyncio.Semaphore(0)
        self._task = asyncio.create_task(self._read(items)) if isinstance(items, AsyncIterable) else None
        self._feeder = None if isinstance(items, AsyncIterable) else Feeder(items, self._from_thread)

    def _from_thread(self, found: Fed) -> None:
        with suppress(RuntimeError):  # the loop has ended, so nothing waits for the item
            self._loop.call_soon_threadsafe(self._deliver, found)

    async def _read(self, items: AsyncIterable[Any]) -> None:
        try:
            iterator = aiter(items)
            while await self._asked.acquire():
                self._deliver(Item(await anext(iterator)))
        except StopAsyncIteration:
            self._deliver(End())
        except BaseException as error:  # raised again by the consumer; a source may await a task that is cancelled
            self._deliver(End(error))
            if not isinstance(error, Exception):
                raise

    def ask(self) -> None:
        """Requests the next item, or the end."""
        if self._feeder is not None:
            self._feeder.ask()
        else:
            self._asked.release()

    async def close(self) -> None:
        if self._feeder is not None:
            self._feeder.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


async def map_requests_async(
    client: AsyncAnswers,
    items: Iterable[T] | AsyncIterable[T],
    prepare: Prepare[T],
    *,
    concurrency: int,
    ordered: bool,
) -> AsyncGenerator[Result[T], None]:
    """Like `threads.map_requests`, in tasks instead of threads."""
    window: Window[T] = Window(concurrency, ordered)
    events: asyncio.Queue[Event] = asyncio.Queue()
    source = _Source(items, events.put_nowait)
    running: set[asyncio.Task[None]] = set()

    async def work(index: int, item: T) -> None:
        try:
            request, timeout = await asyncio.to_thread(prepare, item)
            response = await client._generate(request, timeout)
            result: Generation | BaseException = generation_from(response, request.sampling)
        except BaseException as error:  # passed to the waiting task; includes cancellation
            result = error
        events.put_nowait(Finished(index, item, result))

    try:
        while not window.over:
            if window.ask():
                source.ask()
            match await events.get():
                case Item(value):
                    task = asyncio.create_task(work(window.start(), value))
                    running.add(task)
                    task.add_done_callback(running.discard)
                case End() as end:
                    window.end(end)
                case Finished() as finished:
                    for ready in window.finish(finished):
                        yield ready
    finally:
        for task in (pending := list(running)):
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        await source.close()


class AsyncWorker:
    """Runs the parts of a job over files in a thread, one at a time and in order, even if a caller is cancelled while
    one runs."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saccade-batch")

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def read(self, items: Generator[T, None, None]) -> AsyncGenerator[T, None]:
        """The items, each read in the thread."""
        shared = Shared(items)
        nothing = object()
        try:
            while (item := await self.run(next, shared, nothing)) is not nothing:
                yield item
        finally:
            await self.run(shared.close)

    def end(self) -> None:
        """To be called after the last `run`."""
        self._thread.shutdown(wait=False)
