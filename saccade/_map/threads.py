"""Runs many requests in threads, at most a given number at a time, with memory that does not grow with their number.

The counterpart of `tasks`. Neither is generated from the other, since threads and tasks differ in how they run
concurrently.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from saccade._core.results import generation_from
from saccade._map.feeding import End, Feeder, Item, Shared
from saccade._map.window import Event, Finished, Prepare, Result, Window
from saccade.errors import Cancelled
from saccade.types import Generation
from saccade.v1 import inference_pb2

T = TypeVar("T")
SIGNAL_SECONDS = 0.5
"""After which a signal is noticed, at the latest."""


class Exchange(Protocol):
    """One call; `close` cancels it, from any thread."""

    def close(self) -> None: ...


class Answers(Protocol):
    """The part of a client that `map_requests` needs."""

    def _exchange(self) -> Any: ...

    def _generate(
        self, request: inference_pb2.GenerateRequest, timeout: float | None, exchange: Any = None
    ) -> inference_pb2.GenerateResponse: ...


class _Workers:
    """Threads that send requests, and the means to cancel requests in flight."""

    def __init__(
        self, client: Answers, prepare: Prepare[Any], concurrency: int, deliver: Callable[[Finished], None]
    ) -> None:
        self._client = client
        self._prepare = prepare
        self._deliver = deliver
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="saccade-map")
        self._running: set[Exchange] = set()
        self._lock = threading.RLock()
        """Reentrant: the garbage collector may run `close` in a thread that holds the lock."""
        self._stopped = False

    def start(self, index: int, item: Any) -> None:
        self._pool.submit(self._work, index, item)

    def _work(self, index: int, item: Any) -> None:
        try:
            request, timeout = self._prepare(item)
            result: Generation | BaseException = self._answer(request, timeout)
        except BaseException as error:  # passed to the thread that waits for the result
            result = error
        self._deliver(Finished(index, item, result))

    def _answer(self, request: inference_pb2.GenerateRequest, timeout: float | None) -> Generation:
        exchange = self._client._exchange()
        try:
            with self._lock:
                self._running.add(exchange)
                if self._stopped:
                    raise Cancelled("the map has been closed", request_id=request.request_id)
            response = self._client._generate(request, timeout, exchange)
            return generation_from(response, request.sampling)
        finally:
            with self._lock:
                self._running.discard(exchange)

    def close(self) -> None:
        """Cancels all requests. Does not wait for the threads: the garbage collector, which calls this for an abandoned
        iterator, may run in a thread that holds a lock which the ending threads need, such as that of `threading`."""
        with self._lock:
            self._stopped = True
            running = list(self._running)
        for exchange in running:
            exchange.close()
        self._pool.shutdown(wait=False, cancel_futures=True)


def map_requests(
    client: Answers, items: Iterable[T], prepare: Prepare[T], *, concurrency: int, ordered: bool
) -> Generator[Result[T], None, None]:
    """Yields (index, item, answer or error), in order of completion or of `items`. Reads an item in a separate thread
    when a request may start. Closing the generator cancels requests in flight."""
    window: Window[T] = Window(concurrency, ordered)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    workers = _Workers(client, prepare, concurrency, events.put)
    feeder = Feeder(items, events.put)
    try:
        while not window.over:
            if window.ask():
                feeder.ask()
            match _next(events):
                case Item(value):
                    workers.start(window.start(), value)
                case End() as end:
                    window.end(end)
                case Finished() as finished:
                    yield from window.finish(finished)
    finally:
        feeder.close()
        workers.close()


def _next(events: queue.SimpleQueue[Event]) -> Event:
    """Waits for the next event. A signal that arrives just before a wait does not end it, so that its handler, which
    may raise KeyboardInterrupt, would be called after the next answer only."""
    while True:
        with suppress(queue.Empty):
            return events.get(timeout=SIGNAL_SECONDS)


class Worker:
    """Runs the parts of a job over files in the calling thread."""

    def run(self, function: Callable[..., T], *arguments: Any) -> T:
        return function(*arguments)

    def read(self, items: Generator[T, None, None]) -> Shared[T]:
        """The items. A thread other than the reading one may close the result."""
        return Shared(items)

    def end(self) -> None:
        """To be called after the last `run`."""
