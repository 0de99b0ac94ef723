"""Many requests at once, a bounded number of them in flight, in memory that does not grow with their number."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from saccade.errors import Cancelled, InvalidArgument, SaccadeError
from saccade.requests import build_request
from saccade.results import generation_from
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


class _Workers:
    """Threads that answer requests, and the means to stop those that are on their way."""

    def __init__(self, client: SyncClient, prepare: Prepare[Any], concurrency: int) -> None:
        self._client = client
        self._prepare = prepare
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="saccade-map")
        self._running: set[Attempts] = set()
        self._lock = threading.Lock()
        self._stopped = False
        self.finished: queue.SimpleQueue[tuple[int, Any, Generation | BaseException]] = queue.SimpleQueue()

    def start(self, index: int, item: Any) -> None:
        self._pool.submit(self._work, index, item)

    def _work(self, index: int, item: Any) -> None:
        try:
            request, timeout = self._prepare(item)
            result: Generation | BaseException = self._answer(request, timeout)
        except BaseException as error:  # handed to whoever waits for it
            result = error
        self.finished.put((index, item, result))

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
) -> Generator[tuple[int, T, Generation | SaccadeError], None, None]:
    """(index, item, answer or error) as they come, or in the order of `items`. An item is only taken once there is
    room for it. Closing the generator cancels what is running."""
    window = check_concurrency(concurrency) * (REORDER_WINDOW if ordered else 1)
    workers = _Workers(client, prepare, concurrency)
    source = enumerate(items)
    waiting: dict[int, tuple[int, T, Generation | SaccadeError]] = {}
    started = given = running = 0
    exhausted = False
    try:
        while True:
            while not exhausted and running < concurrency and started - given < window:
                following = next(source, None)
                if following is None:
                    exhausted = True
                else:
                    workers.start(*following)
                    started, running = started + 1, running + 1
            if not running:
                return
            index, item, result = workers.finished.get()
            running -= 1
            if isinstance(result, BaseException) and not isinstance(result, SaccadeError):
                raise result
            waiting[index] = (index, item, result)
            for ready in _ready(waiting, given, index, ordered):
                given += 1
                yield ready
    finally:
        workers.close()


def _ready(waiting: dict[int, T], given: int, index: int, ordered: bool) -> list[T]:
    """Takes from `waiting` what may be handed out now."""
    if not ordered:
        return [waiting.pop(index)]
    ready: list[T] = []
    while given + len(ready) in waiting:
        ready.append(waiting.pop(given + len(ready)))
    return ready


async def _aiter(items: Iterable[T] | AsyncIterable[T]) -> AsyncGenerator[T, None]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item


class Answers(Protocol):
    """What `map_async` needs of a client."""

    async def _generate(
        self, request: inference_pb2.GenerateRequest, timeout: float | None
    ) -> inference_pb2.GenerateResponse: ...


async def map_async(
    client: Answers,
    items: Iterable[T] | AsyncIterable[T],
    prepare: Prepare[T],
    *,
    concurrency: int,
    ordered: bool,
) -> AsyncGenerator[tuple[int, T, Generation | SaccadeError], None]:
    """As `map_sync`, in tasks instead of threads."""
    window = check_concurrency(concurrency) * (REORDER_WINDOW if ordered else 1)
    source = _aiter(items)
    waiting: dict[int, tuple[int, T, Generation | SaccadeError]] = {}
    running: set[asyncio.Task[tuple[int, T, Generation | SaccadeError]]] = set()
    started = given = 0
    exhausted = False

    async def work(index: int, item: T) -> tuple[int, T, Generation | SaccadeError]:
        try:
            request, timeout = await asyncio.to_thread(prepare, item)
            response = await client._generate(request, timeout)
            return index, item, generation_from(response, request.sampling.HasField("logprobs"))
        except SaccadeError as error:
            return index, item, error

    try:
        while True:
            while not exhausted and len(running) < concurrency and started - given < window:
                try:
                    item = await anext(source)
                except StopAsyncIteration:
                    exhausted = True
                else:
                    running.add(asyncio.create_task(work(started, item)))
                    started += 1
            if not running:
                return
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                result = task.result()
                waiting[result[0]] = result
                for ready in _ready(waiting, given, result[0], ordered):
                    given += 1
                    yield ready
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await source.aclose()
