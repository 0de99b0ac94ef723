"""Shared memory between two processes: anonymous files, so that nothing is left behind however the processes end.

A segment has no name. Its descriptor is sent through the socket pair once, both sides map it, and it is reused for
images of about its size, since new pages cost as much as the copy. Memory is allocated when the segment is created, so
that a machine without memory causes an error and not a signal in the middle of a copy. With a CUDA device, segments are
page-locked, so that copies run at the bus's speed.
"""

from __future__ import annotations

import math
import mmap
import os
from dataclasses import dataclass, field
from itertools import count

import torch

SMALLEST = 1 << 16


@dataclass(eq=False)
class Segment:
    """A memory file of `size` bytes that two processes map."""

    number: int
    descriptor: int
    memory: mmap.mmap = field(repr=False)
    pinned: bool = False

    @property
    def size(self) -> int:
        return len(self.memory)

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A view of the segment, which keeps the memory alive."""
        flat = torch.frombuffer(self.memory, dtype=torch.uint8)
        return flat[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def pin(self) -> None:
        """Page-locks the memory if there is a CUDA device."""
        if torch.cuda.is_available():
            flat = torch.frombuffer(self.memory, dtype=torch.uint8)
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(flat.data_ptr(), self.size, 0))
            self.pinned = True

    def close(self) -> None:
        """Closes the descriptor; the memory is freed with the last view of it."""
        if self.pinned:
            flat = torch.frombuffer(self.memory, dtype=torch.uint8)
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(flat.data_ptr()))
            self.pinned = False
        os.close(self.descriptor)


def create_segment(number: int, size: int) -> Segment:
    """Creates a segment. Raises OSError if there is no memory."""
    descriptor = os.memfd_create("saccade-rows", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, size)
        segment = Segment(number, descriptor, mmap.mmap(descriptor, size))
    except BaseException:
        os.close(descriptor)
        raise
    segment.pin()
    return segment


def open_segment(number: int, descriptor: int) -> Segment:
    """Maps a segment of the other side. Takes ownership of the descriptor."""
    segment = Segment(number, descriptor, mmap.mmap(descriptor, 0))
    segment.pin()
    return segment


class SegmentPool:
    """Segments for images in progress, limited in bytes. `give_back` returns a segment that is no longer written to."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.closed: list[int] = []
        """Numbers of segments that the other side may unmap; emptied by the code that notifies it."""
        self._numbers = count(1)
        self._free: list[Segment] = []
        self._taken: set[Segment] = set()

    @property
    def bytes(self) -> int:
        return sum(s.size for s in self._free) + self.taken_bytes

    @property
    def taken_bytes(self) -> int:
        return sum(s.size for s in self._taken)

    def take(self, size: int) -> tuple[Segment, bool] | None:
        """A segment of at least `size` bytes, and whether it is new. None if no segment is free and the limit is
        reached. Raises ValueError for a size above the limit, OSError if the machine has no memory."""
        wanted = rounded(size)
        if wanted > self.capacity_bytes:
            raise ValueError(
                f"{size} bytes in a segment of {wanted}, but all segments together may have {self.capacity_bytes}"
            )
        for segment in self._free:
            if wanted <= segment.size <= 2 * wanted:
                self._free.remove(segment)
                self._taken.add(segment)
                return segment, False
        if self.taken_bytes + wanted > self.capacity_bytes:
            return None
        while self.bytes + wanted > self.capacity_bytes:
            self._close_oldest()
        try:
            segment = create_segment(next(self._numbers), wanted)
        except OSError:
            if not self._free:
                raise
            while self._free:
                self._close_oldest()
            segment = create_segment(next(self._numbers), wanted)
        self._taken.add(segment)
        return segment, True

    def give_back(self, segment: Segment) -> None:
        self._taken.remove(segment)
        self._free.append(segment)

    def close(self) -> None:
        """Closes all segments, when the other side has ended and none is in use any more. Idempotent."""
        for segment in [*self._free, *self._taken]:
            segment.close()
        self._free, self._taken, self.closed = [], set(), []

    def _close_oldest(self) -> None:
        segment = self._free.pop(0)
        segment.close()
        self.closed.append(segment.number)


def rounded(size: int) -> int:
    """The size of the segment for `size` bytes: a power of two, so that segments are reused."""
    return max(1 << (size - 1).bit_length(), SMALLEST)
