"""Sends messages to another process so that the sender never blocks.

A process that hangs reads nothing, its socket's buffer fills up, and a plain `send` would then block its caller,
possibly an event loop. So a message is sent from a separate thread, unless it is small and the socket has room for it:
waking a thread takes longer than sending it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler, recvfds, sendfds
from typing import Any

SMALL = 16384
"""Bytes of a message that can be written without blocking to a Unix socket that is ready for writing: three quarters of
its buffer are free then, on Linux 150 KB unless the system's settings are changed."""
LIGHT = 4096
"""Messages of up to this many numbers are pickled by the caller's thread, which takes about 0.1 ms."""


def send(connection: Connection, message: Any, descriptors: Sequence[int] = ()) -> None:
    """Sends one message and the descriptors that belong to it. The caller must hold the connection's send lock."""
    connection.send(message)
    if descriptors:
        with _as_socket(connection) as sock:
            for descriptor in descriptors:
                sendfds(sock, [descriptor])


@contextlib.contextmanager
def _as_socket(connection: Connection) -> Iterator[socket.socket]:
    """The connection as a socket without a descriptor of its own: if this process may have no more, the other side
    would wait for the descriptors of a message that has been sent, and take the next message for them."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=connection.fileno())
    try:
        yield sock
    finally:
        sock.detach()


def receive_descriptor(connection: Connection) -> int:
    """Receives the next descriptor that belongs to the message just received. Raises OSError or RuntimeError if this
    process may have no more descriptors."""
    with _as_socket(connection) as sock:
        return int(recvfds(sock, 1)[0])


def receive_descriptors(connection: Connection, count: int) -> list[int]:
    """Receives the next `count` descriptors, or none: those that have arrived are closed if `receive_descriptor`
    raises."""
    found: list[int] = []
    try:
        while len(found) < count:
            found.append(receive_descriptor(connection))
    except BaseException:
        _close(found)
        raise
    return found


class Outbox:
    """The sending direction of a Unix socket connection. Thread-safe; messages are sent in the order of `put`."""

    def __init__(self, connection: Connection, on_lost: Callable[[Any], None] = lambda message: None) -> None:
        """`on_lost` is called with each message that can no longer be sent, from the sending thread or from `put`."""
        self._connection, self._on_lost = connection, on_lost
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[Any, Sequence[int]] | None] = queue.SimpleQueue()
        self._queued = 0
        """Messages that the thread has not sent yet."""
        self._thread: threading.Thread | None = None
        self._closed = False

    def put(self, message: Any, descriptors: Sequence[int] = (), *, numbers: int = 0) -> None:
        """Sends or queues a message without blocking. `numbers`: how many numbers the message contains, which
        determines how long pickling takes. Takes ownership of the descriptors."""
        with self._lock:
            lost = self._closed
            if not (lost or self._queued or descriptors) and numbers <= LIGHT:
                try:
                    if self._sent_at_once(message):
                        return
                except (OSError, ValueError):  # closed or broken
                    lost = True
            if not lost:
                self._queued += 1
                self._queue.put((message, descriptors))
                if self._thread is None:
                    thread = threading.Thread(target=self._run, name="saccade-outbox", daemon=True)
                    thread.start()  # if there are no more threads, the next message tries again
                    self._thread = thread
        if lost:
            _close(descriptors)
            self._on_lost(message)

    def _sent_at_once(self, message: Any) -> bool:
        """Sends a message if sending cannot block; returns whether it was sent."""
        ready = select.poll()
        ready.register(self._connection.fileno(), select.POLLOUT)
        if not ready.poll(0):
            return False
        data = ForkingPickler.dumps(message)
        if len(data) > SMALL:
            return False
        self._connection.send_bytes(data)
        return True

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
                with self._lock:
                    self._queued -= 1


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
