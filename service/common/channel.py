"""Sends messages to another process from a separate thread, so that the sender never blocks.

A process that hangs reads nothing, its socket's buffer fills up, and a plain `send` would then block its caller,
possibly an event loop.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import recvfds, sendfds
from typing import Any


def send(connection: Connection, message: Any, descriptors: Sequence[int] = ()) -> None:
    """Sends one message and the descriptors that belong to it. The caller must hold the connection's send lock."""
    connection.send(message)
    if descriptors:
        with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            for descriptor in descriptors:
                sendfds(sock, [descriptor])


def receive_descriptor(connection: Connection) -> int:
    """Receives the next descriptor that belongs to the message just received."""
    with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        return int(recvfds(sock, 1)[0])


class Outbox:
    """One direction of a connection. Thread-safe; messages are sent in the order of `put`."""

    def __init__(self, connection: Connection, on_lost: Callable[[Any], None] = lambda message: None) -> None:
        """`on_lost` is called with each message that can no longer be sent, from the sending thread or from `put`."""
        self._connection, self._on_lost = connection, on_lost
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[Any, Sequence[int]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def put(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        """Queues a message without blocking. Takes ownership of the descriptors."""
        with self._lock:
            closed = self._closed
            if not closed:
                self._queue.put((message, descriptors))
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="saccade-outbox", daemon=True)
                    self._thread.start()
        if closed:
            _close(descriptors)
            self._on_lost(message)

    def close(self, timeout: float | None = None) -> None:
        """Returns when all messages have been sent or lost, after `timeout` seconds at the latest. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            message, descriptors = entry
            try:
                send(self._connection, message, descriptors)
            except (OSError, ValueError):  # closed or broken
                self._on_lost(message)
            finally:
                _close(descriptors)


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
