"""Reads a source of items in a separate thread, one item at a time and only on request, so that a blocking source does
not block the consumer."""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Item:
    """The next item of a source."""

    value: Any


@dataclass(frozen=True)
class End:
    """The source has no more items, or has failed."""

    error: BaseException | None = None


Fed: TypeAlias = Item | End


class Feeder:
    """Reads `items` in a separate thread, and calls `deliver` with each item in that thread.

    A blocking source cannot be interrupted: `close` does not wait for it, and the thread ends with the source's next
    item or with the process.
    """

    def __init__(self, items: Iterable[Any], deliver: Callable[[Fed], None]) -> None:
        self._items = items
        self._deliver = deliver
        self._asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def ask(self) -> None:
        """Requests the next item, or the end."""
        if self._thread is None:
            # A source may use context variables of the caller.
            context = contextvars.copy_context()
            self._thread = threading.Thread(
                target=context.run, args=(self._feed,), name="saccade-map-source", daemon=True
            )
            self._thread.start()
        self._asked.put(True)

    def _feed(self) -> None:
        try:
            source = iter(self._items)
            while self._asked.get():
                try:
                    found: Fed = Item(next(source))
                except StopIteration:
                    found = End()
                if self._closed:
                    return
                self._deliver(found)
                if isinstance(found, End):
                    return
        except BaseException as error:  # raised again by the consumer
            if not self._closed:
                self._deliver(End(error))

    def close(self) -> None:
        """Stops deliveries. Idempotent."""
        self._closed = True
        self._asked.put(False)


class Shared(Iterator[T]):
    """A generator that one thread reads and another may close; closing waits for the item that is being read."""

    def __init__(self, items: Generator[T, None, None]) -> None:
        self._items = items
        self._lock = threading.Lock()

    def __next__(self) -> T:
        with self._lock:
            return next(self._items)

    def close(self) -> None:
        with self._lock:
            self._items.close()
