"""Many requests at once, a bounded number of them in flight, in memory that does not grow with their number."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar

from saccade._core.requests import build_request
from saccade._core.results import generation_from
from saccade._transport.feeding import End, Fed, Feeder, Item
from saccade.errors import Cancelled, InvalidArgument, SaccadeError
from saccade.types import Generation, Outcome
from saccade.v1 import inference_pb2

if TYPE_CHECKING:
    from saccade.calls import Attempts
    from saccade.client import SyncClient

T = TypeVar("T")
Prepared = tuple[inference_pb2.GenerateRequest, float | None]
"""A request and its timeout."""
Prepare = Callable[[T], Prepared]

REORDER_WINDOW = 8
"""How many times `concurrency` results may wait for an earlier one when the order is to be kept."""


def prepare_mapping(request: Mapping[str, Any]) -> Prepared:
    """The arguments of `generate` as a mapping, with an optional custom_id."""
    if not isinstance(request, Mapping) or "prompt" not in request:
        raise InvalidArgument("map: expected mappings with the arguments of generate, prompt among them")
    options = {key: value for key, value in request.items() if key not in ("custom_id", "timeout", "prompt")}
    return build_request(request["prompt"], **options), request.get("timeout")


def outcome(index: int, request: Any, result: Generation | SaccadeError) -> Outcome:
    custom_id = request.get("custom_id") if isinstance(request, Mapping) else None
    if isinstance(result, SaccadeError):
        return Outcome(index, custom_id, None, result)
    return Outcome(index, custom_id, result, None)


def check_concurrency(concurrency: int) -> int:
    if concurrency < 1:
        raise InvalidArgument(f"concurrency: expected 1 or more, got {concurrency}")
    return concurrency


@dataclass(frozen=True)
class Finished:
    """A request that has been answered. What is no SaccadeError is a bug, or an interrupt, and ends the map."""

    index: int
    item: Any
    result: Generation | BaseException


Event: TypeAlias = Fed | Finished
"""All that a map waits for."""
Result = tuple[int, T, Generation | SaccadeError]


class Window(Generic[T]):
    """What of a map is where: taken from its source, running, waiting for an earlier one, handed out."""

    def __init__(self, concurrency: int, ordered: bool) -> None:
        self._concurrency = check_concurrency(concurrency)
        self._ordered = ordered
        self._window = concurrency * (REORDER_WINDOW if ordered else 1)
        self._waiting: dict[int, Result[T]] = {}
        self._started = self._given = self._running = 0
        self._asked = self._exhausted = False

    @property
    def over(self) -> bool:
        return self._exhausted and not self._running

    def ask(self) -> bool:
        """Whether the source is to be asked for an item now; if so, it counts as asked."""
        room = self._running < self._concurrency and self._started - self._given < self._window
        if self._asked or self._exhausted or not room:
            return False
        self._asked = True
        return True

    def start(self) -> int:
        """The source has given an item; returns its index."""
        self._asked = False
        self._started, self._running = self._started + 1, self._running + 1
        return self._started - 1

    def end(self, end: End) -> None:
        """The source has no more. Raises what it failed with."""
        self._exhausted = True
        if end.error is not None:
            raise end.error

    def finish(self, finished: Finished) -> Generator[Result[T], None, None]:
        """What may be handed out now; it counts as handed out when it is taken from here."""
        self._running -= 1
        result = finished.result
        if isinstance(result, BaseException) and not isinstance(result, SaccadeError):
            raise result
        self._waiting[finished.index] = (finished.index, finished.item, result)
        index = self._given if self._ordered else finished.index
        while index in self._waiting:
            self._given += 1
            yield self._waiting.pop(index)
            index += 1
            if not self._ordered:
                return


class _Workers:
    """Threads that answer requests, and the means to stop those that are on their way."""

    def __init__(
        self, client: SyncClient, prepare: Prepare[Any], concurrency: int, deliver: Callable[[Finished], None]
    ) -> None:
        self._client = client
        self._prepare = prepare
        self._deliver = deliver
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="saccade-map")
        self._running: set[Attempts] = set()
        self._lock = threading.Lock()
        self._stopped = False

    def start(self, index: int, item: Any) -> None:
        self._pool.submit(self._work, index, item)

    def _work(self, index: int, item: Any) -> None:
        try:
            request, timeout = self._prepare(item)
            result: Generation | BaseException = self._answer(request, timeout)
        except BaseException as error:  # handed to whoever waits for it
            result = error
        self._deliver(Finished(index, item, result))

    def _answer(self, request: inference_pb2.GenerateRequest, timeout: float | None) -> Generation:
        attempts = self._client._attempts(request, timeout)
        with self._lock:
            if self._stopped:
                raise Cancelled("the map has been closed", request_id=request.request_id)
            self._running.add(attempts)
        try:
            return generation_from(attempts.result(), request.sampling.HasField("logprobs"))
        finally:
            with self._lock:
                self._running.discard(attempts)

    def close(self) -> None:
        with self._lock:
            self._stopped = True
            running = list(self._running)
        for attempts in running:
            attempts.cancel()
        self._pool.shutdown(wait=True, cancel_futures=True)


def map_sync(
    client: SyncClient, items: Iterable[T], prepare: Prepare[T], *, concurrency: int, ordered: bool
) -> Generator[Result[T], None, None]:
    """(index, item, answer or error) as they come, or in the order of `items`. An item is only taken once there is
    room for it, in a thread beside this one. Closing the generator cancels what is running."""
    window: Window[T] = Window(concurrency, ordered)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    workers = _Workers(client, prepare, concurrency, events.put)
    feeder = Feeder(items, events.put)
    try:
        while not window.over:
            if window.ask():
                feeder.ask()
            match events.get():
                case Item(value):
                    workers.start(window.start(), value)
                case End() as end:
                    window.end(end)
                case Finished() as finished:
                    yield from window.finish(finished)
    finally:
        feeder.close()
        workers.close()


class Answers(Protocol):
    """What `map_async` needs of a client."""

    async def _generate(
        self, request: inference_pb2.GenerateRequest, timeout: float | None
    ) -> inference_pb2.GenerateResponse: ...


class _Source:
    """The source of an asyncio map: an asynchronous one in a task, any other in a thread, for it may block. One item
    at a time, delivered in the event loop."""

    def __init__(self, items: Iterable[Any] | AsyncIterable[Any], deliver: Callable[[Fed], None]) -> None:
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._asked = asyncio.Semaphore(0)
        self._task = asyncio.create_task(self._read(items)) if isinstance(items, AsyncIterable) else None
        self._feeder = None if isinstance(items, AsyncIterable) else Feeder(items, self._from_thread)

    def _from_thread(self, found: Fed) -> None:
        with suppress(RuntimeError):  # the loop has ended, and nobody waits any more
            self._loop.call_soon_threadsafe(self._deliver, found)

    async def _read(self, items: AsyncIterable[Any]) -> None:
        try:
            iterator = aiter(items)
            while await self._asked.acquire():
                self._deliver(Item(await anext(iterator)))
        except StopAsyncIteration:
            self._deliver(End())
        except Exception as error:  # raised where the items are used
            self._deliver(End(error))

    def ask(self) -> None:
        """Has one more item read, or the end found."""
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


async def map_async(
    client: Answers,
    items: Iterable[T] | AsyncIterable[T],
    prepare: Prepare[T],
    *,
    concurrency: int,
    ordered: bool,
) -> AsyncGenerator[Result[T], None]:
    """As `map_sync`, in tasks instead of threads."""
    window: Window[T] = Window(concurrency, ordered)
    events: asyncio.Queue[Event] = asyncio.Queue()
    source = _Source(items, events.put_nowait)
    running: set[asyncio.Task[None]] = set()

    async def work(index: int, item: T) -> None:
        try:
            request, timeout = await asyncio.to_thread(prepare, item)
            response = await client._generate(request, timeout)
            result: Generation | BaseException = generation_from(response, request.sampling.HasField("logprobs"))
        except BaseException as error:  # handed to whoever waits for it, a cancellation too
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
