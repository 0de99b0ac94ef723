"""The encoder process: `python -m service.servers.encoder_process FD`, started by `process_link.py`, which describes
the protocol. The encoder reads pixels from shared segments and writes rows into them."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from service.common.helper_process import ignore_stop_signals, log_to_stderr, torch_imports

with torch_imports():
    import torch

    from encoder.item import ItemDescription
    from kernels.host_memory import keep_freed_memory, release_program_pages
    from service.common.channel import receive_descriptor
    from service.common.config import EngineOptions
    from service.encoding.encoder import LocalEncoder
    from service.encoding.entries import Work
    from service.encoding.process_link import PlacedRows
    from service.encoding.segments import Segment, open_segment

REPORTED = ("images", "batches", "real_tokens", "padded_tokens", "encode_seconds")
"""Counters that the decoder process shows in its metrics."""


class SegmentWork:
    """The `WorkSource` of this process: images that arrived through the socket and have not been answered.

    `receive` runs in a thread of its own, the other methods on the encoder's thread. An image is answered by the thread
    that removes it from `_waiting`: the first if it is cancelled, else the second.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        """Held while a message is sent."""
        self._segments: dict[int, Segment] = {}
        self._waiting: dict[int, Work] = {}
        self._arrived: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.encoder: LocalEncoder | None = None

    def send(self, message: Any) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._connection.send(message)

    def receive(self) -> None:
        """Handles messages until the decoder process closes this process or ends."""
        try:
            while True:
                match self._connection.recv():
                    case ("segment", number):
                        self._segments[number] = open_segment(number, receive_descriptor(self._connection))
                    case ("forget", number):
                        self._segments.pop(number).close()
                    case ("encode", ticket, description, number, rows):
                        self._add(ticket, description, self._segments[number], rows)
                    case ("cancel", ticket):
                        if self._waiting.pop(ticket, None) is not None:
                            self.send(("cancelled", ticket))
                    case ("log level", level):
                        logging.getLogger().setLevel(level)
                    case ("close",):
                        return
        except (EOFError, OSError):
            pass  # the decoder process has ended
        finally:
            self._arrived.put(False)

    def wait(self) -> bool:
        """Waits for new work. Returns False if there will be no more."""
        return self._arrived.get()

    def _add(self, ticket: int, description: ItemDescription, segment: Segment, rows: PlacedRows) -> None:
        item = description.with_patches(segment.tensor(0, description.shape, getattr(torch, description.dtype)))
        self._waiting[ticket] = Work(b"", item, segment.tensor(rows.offset, rows.shape, rows.dtype), ticket)
        self._arrived.put(True)

    def take(self, max_tokens: int | None = None) -> list[Work]:
        """Takes work in the order of arrival, which the decoder process has chosen."""
        taken: list[Work] = []
        total = 0
        for ticket, work in list(self._waiting.items()):
            if taken and max_tokens is not None and total + work.image.tokens > max_tokens:
                break
            if self._waiting.pop(ticket, None) is not None:  # it may have been cancelled meanwhile
                taken.append(work)
                total += work.image.tokens
        return taken

    def publish(self, works: Sequence[Work], counts: Sequence[tuple[int, ...] | None]) -> None:
        assert self.encoder is not None
        stats = self.encoder.stats()
        for work, rows in zip(works, counts, strict=True):
            self.send(("done", work.ticket, rows, {name: stats[name] for name in REPORTED}))

    def fail(self, work: Work, error: Exception) -> None:
        self.send(("error", work.ticket, str(error), isinstance(error, ValueError)))


def main(descriptor: int) -> int:
    connection: Connection = Connection(descriptor)
    ignore_stop_signals()  # the decoder process decides when this process stops.
    options, log_level = connection.recv()
    log_to_stderr(log_level)
    keep_freed_memory()
    with contextlib.suppress(EOFError, ConnectionError):  # the decoder process has ended; nothing needs its images
        return _serve(connection, options)
    return 0


def _serve(connection: Connection, options: EngineOptions) -> int:
    source = SegmentWork(connection)
    try:
        with torch_imports():
            from service.engine.build import encoder_of_process

        source.encoder = encoder_of_process(options, source)
    except ValueError as error:  # ConfigError, CheckpointError and errors of the runner
        connection.send(("failed", str(error)))
        return 1
    release_program_pages()
    connection.send(("ready",))
    threading.Thread(target=source.receive, name="saccade-encoder-receiver", daemon=True).start()
    while source.wait():
        while source.encoder.run_time_slice():
            pass
    source.encoder.close()
    return 0


if __name__ == "__main__":
    code = main(int(sys.argv[1]))
    sys.stderr.flush()
    os._exit(code)  # threads of torch may outlive the interpreter and crash it
