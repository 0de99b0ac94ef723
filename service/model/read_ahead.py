"""Threads that read the next tensors of files into the system's cache while earlier ones are converted."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kernels.host_memory import private_mapping

THREADS = 4
"""Number of concurrent reads: a single one would leave a fast disk, and even more a network disk, mostly idle."""
PIECE = 4 * 2**20
"""Bytes of one read."""
AHEAD = 512 * 2**20
"""Maximum number of bytes that are read ahead."""


class Range(NamedTuple):
    """Bytes of a file."""

    file: Path
    begin: int
    length: int


class ReadAhead:
    """Reads ranges in their order, in pieces, at most `ahead` bytes (`AHEAD`) beyond what `reached` says.

    The bytes stay in the system's cache, which is not part of this process's memory. A range that cannot be read ends
    the reading ahead without an error: using that range raises one.
    """

    def __init__(
        self, ranges: Sequence[Range], *, ahead: int | None = None, threads: int = THREADS, piece: int = PIECE
    ) -> None:
        self._pieces = [
            Range(file, begin + at, min(piece, length - at))
            for file, begin, length in ranges
            for at in range(0, length, piece)
        ]
        self._ahead, self._piece = AHEAD if ahead is None else ahead, piece
        self._changed = threading.Condition()
        self._next = self._taken = self._reached = self._busy = 0
        self._ended = False
        self.bytes_read = 0
        self._threads = [
            threading.Thread(target=self._read, name=f"read-ahead-{index}", daemon=True)
            for index in range(min(threads, len(self._pieces)))
        ]
        for thread in self._threads:
            thread.start()

    def reached(self, done: int) -> None:
        """To be called when the first `done` bytes of the ranges, in their order, are no longer needed."""
        with self._changed:
            self._reached = done
            self._changed.notify_all()

    def wait(self, timeout: float) -> bool:
        """Waits until everything has been read that may be read before the next `reached`. Returns False after
        `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._busy and (self._ended or not self._may_read()), timeout)

    def close(self) -> None:
        """Ends the threads, after the pieces that they are reading."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _may_read(self) -> bool:
        return self._next < len(self._pieces) and self._taken < self._reached + self._ahead

    def _take(self) -> Range | None:
        """The next piece, as soon as it may be read; None if there is none."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._next >= len(self._pieces) or self._may_read())
            if self._ended or self._next >= len(self._pieces):
                return None
            piece = self._pieces[self._next]
            self._next, self._taken, self._busy = self._next + 1, self._taken + piece.length, self._busy + 1
            return piece

    def _read(self) -> None:
        # Not the C allocator's memory: it never returns the end of a thread's heap to the system.
        memory, handles = private_mapping(self._piece), dict[Path, int]()
        try:
            while (piece := self._take()) is not None:
                found = -1
                try:
                    if piece.file not in handles:
                        handles[piece.file] = os.open(piece.file, os.O_RDONLY | os.O_CLOEXEC)
                    found = self._read_piece(handles[piece.file], memory, piece)
                except OSError:
                    pass
                with self._changed:
                    self._busy -= 1
                    self.bytes_read += max(found, 0)
                    self._ended = self._ended or found < piece.length
                    self._changed.notify_all()
        finally:
            memory.close()
            for handle in handles.values():
                os.close(handle)

    @staticmethod
    def _read_piece(handle: int, memory: mmap.mmap, piece: Range) -> int:
        with memoryview(memory) as buffer, buffer[: piece.length] as wanted:
            return os.preadv(handle, [wanted], piece.begin)
