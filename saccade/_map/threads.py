"""Many requests at once in threads, a bounded number of them in flight, in memory that does not grow with their number.

The counterpart of `tasks`, written by hand: what runs side by side is what differs between threads and tasks.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from saccade._core.results import generation_from
from saccade._map.feeding import End, Feeder, Item, Shared
from saccade._map.window import Event, Finished, Prepare, Result, Window
from saccade.errors import Cancelled
from saccade.types import Generation
from saccade.v1 import inference_pb2

T = TypeVar("T")


class Exchange(Protocol):
    """One call; `close` cancels it, from any thread."""

    def close(self) -> None: ...


class Answers(Protocol):
    """What `map_requests` needs of a client."""

    def _exchange(self) -> Any: ...

    def _generate(
        self, request: inference_pb2.GenerateRequest, timeout: float | None, exchange: Any = None
    ) -> inference_pb2.GenerateResponse: ...


class _Workers:
    """Threads that answer requests, and the means to stop those that are on their way."""

    def __init__(
        self, client: Answers, prepare: Prepare[Any], concurrency: int, deliver: Callable[[Finished], None]
    ) -> None:
        self._client = client
        self._prepare = prepare
        self._deliver = deliver
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="saccade-map")
        self._running: set[Exchange] = set()
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
        exchange = self._client._exchange()
        with self._lock:
            if self._stopped:
                raise Cancelled("the map has been closed", request_id=request.request_id)
            self._running.add(exchange)
        try:
            response = self._client._generate(request, timeout, exchange)
            return generation_from(response, request.sampling.HasField("logprobs"))
        finally:
            with self._lock:
                self._running.discard(exchange)

    def close(self) -> None:
        with self._lock:
            self._stopped = True
            running = list(self._running)
        for exchange in running:
            exchange.close()
        self._pool.shutdown(wait=True, cancel_futures=True)


def map_requests(
    client: Answers, items: Iterable[T], prepare: Prepare[T], *, concurrency: int, ordered: bool
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


class Worker:
    """Runs the parts of a job over files in the thread that asks for them."""

    def run(self, function: Callable[..., T], *arguments: Any) -> T:
        return function(*arguments)

    def read(self, items: Generator[T, None, None]) -> Shared[T]:
        """The items. They may be closed from another thread than the one that reads them."""
        return Shared(items)

    def end(self) -> None:
        """After the last `run`."""
