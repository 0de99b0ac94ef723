"""An encoder in another process on this host, seen from the decoder. If it crashes, its images are retried and the
engine continues.

Pixels and rows are in shared segments (`segments.py`); control messages are sent through a socket pair, as between
frontend and engine. Decoder to encoder: (options, log level) first, then ("segment", number) with a descriptor,
("forget", number), ("encode", ticket, description, segment, rows), ("cancel", ticket), ("log level", level),
("close",). Encoder to decoder: ("ready",) or ("failed", message), then for each ticket exactly one of ("done", ticket,
counts, stats), ("error", ticket, message, invalid) and ("cancelled", ticket). Until then, or until the process is dead,
its segment is not reused: a late encoder may still write a revoked image there.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import threading
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from service.common.channel import send
from service.common.config import ConfigError, EngineOptions
from service.common.helper_process import HelperFailed, log_level, start_helper, until_ready
from service.encoding.encoder_pool import LinkOwner
from service.encoding.entries import EncoderUnavailable, EncodingFailed, Work
from service.encoding.segments import Segment, SegmentPool, rounded

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 30.0
END_SECONDS = 10.0
"""A process that has not ended by itself so long after the link was closed is killed."""
ALIGNMENT = 64
MAX_IN_PROGRESS = 64
"""Maximum number of images in the process: their messages fit the socket's buffer, so a hanging process blocks no
sender."""


@dataclass(frozen=True)
class PlacedRows:
    """Position of an image's rows in its segment."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class ProcessLink:
    """One encoder process, restarted when it dies."""

    name = "process"

    def __init__(self, options: EngineOptions, *, segment_bytes: int) -> None:
        """`segment_bytes`: limit on pixels and rows in progress."""
        self._options = options
        self._pool = SegmentPool(segment_bytes)
        self._lock = threading.Lock()
        self._works: dict[int, Work] = {}
        self._segments: dict[int, Segment] = {}
        self._unsent: deque[Work] = deque()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._reason, self._log_level = "not started", log_level()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._counts: dict[str, float] = {"starts": 0}

    @property
    def alive(self) -> bool:
        return self._connection is not None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def reason(self) -> str:
        return "" if self.alive else self._reason

    @property
    def in_progress(self) -> int:
        with self._lock:
            return sum(work.image.tokens for work in self._works.values())

    load = in_progress

    def start(self, owner: LinkOwner) -> None:
        """Starts the process. Raises ConfigError with its message if it rejects the options."""
        self._owner = owner
        self._connection = self._connect()
        self._thread = threading.Thread(target=self._loop, name="saccade-encoder-process", daemon=True)
        self._thread.start()

    def send(self, work: Work, seconds_left: float | None) -> None:
        with self._lock:
            self._works[work.ticket] = work
            self._unsent.append(work)
        self._send_waiting()

    def revoke(self, work: Work) -> bool:
        with self._lock:
            if self._works.pop(work.ticket, None) is None:
                return False
            if work in self._unsent:
                self._unsent.remove(work)
            else:  # its segment stays in use until the encoder has answered
                self._post(("cancel", work.ticket))
            return True

    def abandon(self) -> None:
        if self._process is not None:
            log.error("the encoder process %d does not answer; it is killed", self._process.pid)
            self._process.kill()

    def stats(self) -> dict[str, float]:
        with self._lock:
            return {
                **self._counts,
                "in_progress_tokens_now": sum(work.image.tokens for work in self._works.values()),
                "segment_bytes": self._pool.bytes,
                "quarantined_bytes": sum(s.size for t, s in self._segments.items() if t not in self._works),
            }

    def close(self) -> None:
        self._closing.set()
        with self._lock:
            self._post(("close",))
        if self._process is not None:
            try:
                self._process.wait(timeout=END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._thread is not None:
            self._thread.join()
        self._pool.close()

    # -- to the encoder ------------------------------------------------------------------------------------------------

    def _send_waiting(self) -> None:
        """Sends the images for which there are free segments, in order."""
        failures: list[tuple[Work, Exception]] = []
        with self._lock:
            while self._unsent and self._connection is not None:
                work = self._unsent[0]
                try:
                    if not self._place(work):
                        break
                except ValueError as error:
                    failures.append((work, ValueError(f"the image takes {error}")))
                except OSError as error:
                    message = f"no shared memory for the image: {error.strerror or error}"
                    failures.append((work, EncoderUnavailable(message)))
                self._unsent.popleft()
            for work, _ in failures:
                del self._works[work.ticket]
        for work, failure in failures:
            self._owner.failed(self, work, failure)

    def _place(self, work: Work) -> bool:
        """Copies the pixels to a segment and notifies the encoder. False if no segment is free."""
        if len(self._segments) >= MAX_IN_PROGRESS:
            return False
        pixels, offset = work.image.patches, _rows_offset(work)
        taken = self._pool.take(offset + work.rows.numel() * work.rows.itemsize)
        for number in self._pool.closed:
            self._post(("forget", number))
        self._pool.closed.clear()
        if taken is None:
            return False
        segment, is_new = taken
        if is_new:
            self._post(("segment", segment.number), segment.descriptor)
        segment.tensor(0, tuple(pixels.shape), pixels.dtype).copy_(pixels)
        rows = PlacedRows(offset, tuple(work.rows.shape), work.rows.dtype)
        self._segments[work.ticket] = segment
        self._post(("encode", work.ticket, work.image.description, segment.number, rows))
        return True

    def _post(self, message: Any, descriptor: int | None = None) -> None:
        """Sends a message, after this process's log level if that has changed; the lock must be held. The reader thread
        notices broken connections."""
        if self._connection is not None:
            with contextlib.suppress(OSError, ValueError):
                if (level := log_level()) != self._log_level:
                    self._log_level = level
                    send(self._connection, ("log level", level))
                send(self._connection, message, () if descriptor is None else (descriptor,))

    # -- from the encoder ----------------------------------------------------------------------------------------------

    def _connect(self) -> Connection:
        """Starts a process and waits until it is ready. Raises ConfigError."""
        self._process, connection = start_helper("service.servers.encoder_process")
        self._log_level = log_level()
        first = self._options, self._log_level
        try:
            until_ready(self._process, connection, first, self._options.load_timeout, "encoder")
        except HelperFailed as error:
            raise ConfigError(str(error)) from None
        self._counts["starts"] += 1
        return connection

    def _loop(self) -> None:
        pause = FIRST_PAUSE
        while True:
            if self._connection is not None:
                try:
                    self._read(self._connection)
                except Exception:  # for example, no memory for rows; images would wait for further messages forever
                    log.exception("a message of the encoder process cannot be processed: it is killed")
                    assert self._process is not None
                    self._process.kill()
                self._end()
                pause = FIRST_PAUSE
            if self._closing.wait(pause):
                return
            pause = min(pause * 2, LONGEST_PAUSE)
            try:
                connection = self._connect()
            except Exception as error:  # the cause may be temporary
                self._reason = str(error)
                log.error("the encoder process did not start again: %s", error)
                continue
            with self._lock:
                self._connection = connection
                if self._closing.is_set():  # `close` had no connection for its message
                    self._post(("close",))
            log.warning("the encoder runs again, as process %d", self.pid)
            self._send_waiting()  # images that were assigned just after the last process had ended
            self._owner.changed(self)

    def _read(self, connection: Connection) -> None:
        """Reads messages until the process has ended."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                match connection.recv():
                    case ("done", ticket, counts, stats):
                        self._counts |= stats
                        if (work := self._finish(ticket, copy=True)) is not None:
                            self._owner.written(self, work, counts)
                    case ("error", ticket, message, invalid):
                        if (work := self._finish(ticket)) is not None:
                            self._owner.failed(self, work, (ValueError if invalid else EncodingFailed)(message))
                    case ("cancelled", ticket):
                        self._finish(ticket)
                self._send_waiting()
                self._owner.changed(self)

    def _finish(self, ticket: int, *, copy: bool = False) -> Work | None:
        """The encoder has finished with a ticket, so its segment is free. None if the image was revoked."""
        with self._lock:
            work = self._works.pop(ticket, None)
            segment = self._segments.pop(ticket)
            if copy and work is not None:
                work.rows.copy_(segment.tensor(_rows_offset(work), tuple(work.rows.shape), work.rows.dtype))
            self._pool.give_back(segment)
            return work

    def _end(self) -> None:
        """The process has ended, so nothing writes to the segments any more."""
        assert self._process is not None
        code = self._process.wait()
        self._reason = f"the encoder process ended with code {code}"
        with self._lock:
            lost = list(self._works.values())
            self._works.clear()
            self._unsent.clear()
            self._segments.clear()
            self._pool.close()
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        if not self._closing.is_set():
            log.error("%s", self._reason)
            self._owner.lost(self, lost, self._reason)


def _rows_offset(work: Work) -> int:
    """The rows are stored after the pixels."""
    return _aligned(work.image.nbytes)


def segment_for(pixel_bytes: int, row_bytes: int) -> int:
    """Bytes of the segment of an image."""
    return rounded(_aligned(pixel_bytes) + row_bytes)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
