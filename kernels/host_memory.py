"""Host memory of this process: memory that a step frees is kept for the next step, weights have mappings of their own
in huge pages, and files are mapped, with pages released once they have been read."""

from __future__ import annotations

import ctypes
import math
import mmap
import re
import sys
import threading
import weakref
from bisect import bisect_right, insort
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
MMAP_THRESHOLD = 32 << 20
"""The largest value that glibc accepts; larger pieces are mapped and unmapped one by one in any case."""


def keep_freed_memory(limit: int = 512 << 20) -> bool:
    """Tells the C allocator to return memory to the system only beyond `limit` freed bytes, for the whole process.

    Activations of a few megabytes are allocated and freed in every layer. By default glibc maps each of them, or trims
    its heap after each, and the kernel zeroes the pages again: measured 40 % of the time of a bfloat16 vision tower on
    a CPU. Returns whether the allocator accepted it (glibc only). To be called once at the start of the process.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(M_TRIM_THRESHOLD, limit)) and bool(mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD))


def release_freed_memory() -> bool:
    """Returns all freed pages to the system now: for use after loading weights, whose temporary copies leave far more
    freed memory than steps need. Returns whether the allocator did so (glibc only)."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        return bool(ctypes.CDLL(None).malloc_trim(0))
    except (OSError, AttributeError):
        return False


HUGE = 2 << 20
"""Bytes of a huge page."""
SHARED = 32 << 20
"""Bytes of a mapping that several tensors share; a tensor of more than half of this has a mapping of its own."""
COPIED = 1 << 20
"""Elements that `kept_copy` copies at a time, before it drops the pages that they were read from."""
RELEASED = 16 << 20
"""Each time this many bytes of weights have been allocated, freed pages of the C allocator return to the system."""


def _advise(begin: int, end: int, advice: int | None) -> bool:
    """Whether the system accepted the advice about these addresses, which must be multiples of the page size."""
    if begin >= end or advice is None:
        return False
    try:
        madvise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return False
    return bool(madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice) == 0)


_MAPPED_FILE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) r-[x-]p \S+ \S+ [1-9]\d* +/")
"""In `/proc/self/smaps`: the first line of a private mapping of a file that this process may not write to."""
_UNWRITTEN = "Anonymous:", "Swap:"
"""Fields of a mapping that are zero if no page of it was ever written. Written pages, such as those that the loader has
relocated, differ from the file and must stay."""


def release_program_pages() -> int:
    """Removes the pages of program and library files from this process's memory. To be called once, after startup,
    which is all that most of these pages are used for (importing torch reads 70 MiB of its libraries). Pages that are
    used again come back from the system's file cache. Returns the size of the mappings in bytes, 0 where there is no
    `/proc`."""
    try:
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        return 0
    released = begin = end = zeros = 0
    for line in lines:
        if "-" in line.split(" ", 1)[0]:
            found = _MAPPED_FILE.match(line)
            begin, end = (int(found[1], 16), int(found[2], 16)) if found else (0, 0)
            zeros = 0
        elif line.startswith(_UNWRITTEN) and line.endswith(" 0 kB"):
            zeros += 1
            if zeros == len(_UNWRITTEN) and _advise(begin, end, getattr(mmap, "MADV_DONTNEED", None)):
                released += end - begin
    return released


def use_huge_pages(tensor: Tensor) -> bool:
    """Asks for huge pages for a tensor in host memory, preferably before it is first written.

    Each step reads all weights and states. With pages of 4 KiB that takes a page walk per 4 KiB: one core reads 19 GB/s
    of weights, instead of 29 with huge pages, and processes 30 GB/s of states instead of 41 (Zen 4). The tensor takes
    no more memory than without: only huge pages that lie wholly inside it are used. Returns whether the system accepted
    the advice, which it need not follow.
    """
    if tensor.device.type != "cpu":
        return False
    begin, end = -(-tensor.data_ptr() // HUGE) * HUGE, (tensor.data_ptr() + tensor.nbytes) // HUGE * HUGE
    return _advise(begin, end, getattr(mmap, "MADV_HUGEPAGE", None))


class _Mappings:
    """Memory for weights, separate from the C allocator's, where weights that lie between temporary copies would leave
    gaps that nothing fills (measured: 4 GB for 15 GB of weights). A mapping is unmapped when its last tensor is gone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shared: Tensor | None = None
        self._used = self._unreleased = 0

    def take(self, nbytes: int) -> Tensor:
        """uint8 `[nbytes]`, zeros, at a multiple of 64; a large one begins at a huge page."""
        with self._lock:
            self._unreleased += nbytes
            if self._unreleased >= RELEASED:  # small tensors of other owners also lie between the temporary copies
                self._unreleased = 0
                release_freed_memory()
            if nbytes > SHARED // 2:
                return _mapped(nbytes)
            if self._shared is None or self._used + nbytes > SHARED:
                self._shared, self._used = _mapped(SHARED), 0
            begin, self._used = self._used, self._used + -(-nbytes // 64) * 64
            return self._shared[begin : begin + nbytes]


_mappings = _Mappings()


def private_mapping(nbytes: int) -> mmap.mmap:
    """A mapping of zeros. A page counts as memory from its first write until the mapping is closed or collected."""
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    return mmap.mmap(-1, nbytes, **private)


def _mapped(nbytes: int) -> Tensor:
    """uint8 `[nbytes]` in a mapping of its own, from the beginning of a huge page on."""
    import torch

    whole = torch.frombuffer(private_mapping(nbytes + HUGE), dtype=torch.uint8)
    first = -whole.data_ptr() % HUGE
    found = whole[first : first + nbytes]
    use_huge_pages(found)
    return found


def weight_memory(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of zeros for a weight that stays: separate from the C allocator's memory, and in huge pages where the
    system has them and the tensor fills them."""
    return _mappings.take(math.prod(shape) * dtype.itemsize).view(dtype).view(*shape)


def buffer_memory(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of zeros for a buffer of which steps write only the part that they need: the rest takes no memory,
    except in the last huge page. The C allocator could reuse freed memory instead, whose pages are still resident."""
    import torch

    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return torch.empty(*shape, dtype=dtype)
    return _mapped(nbytes).view(dtype).view(*shape)


class _FileMappings:
    """Addresses of mapped files."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begins: list[int] = []
        self._ends: dict[int, int] = {}

    def add(self, mapped: mmap.mmap, begin: int, end: int) -> None:
        """The file is mapped to these addresses until the object is gone."""
        with self._lock:
            insort(self._begins, begin)
            self._ends[begin] = end
        weakref.finalize(mapped, self._remove, begin)

    def _remove(self, begin: int) -> None:
        with self._lock:
            self._begins.remove(begin)
            del self._ends[begin]

    def holds(self, begin: int, end: int) -> bool:
        """Whether all of these addresses are of one mapped file."""
        with self._lock:
            place = bisect_right(self._begins, begin) - 1
            return place >= 0 and end <= self._ends[self._begins[place]]


_files = _FileMappings()


def map_file(handle: int, offset: int, nbytes: int) -> Tensor:
    """uint8 `[nbytes]`: bytes of an open file from `offset` on, read when they are used. The tensor must not be written
    to, because `drop_pages` discards changes. Raises OSError or ValueError if the file cannot be mapped."""
    import torch

    begin = offset - offset % mmap.ALLOCATIONGRANULARITY
    mapped = mmap.mmap(handle, offset - begin + nbytes, access=mmap.ACCESS_COPY, offset=begin)
    whole = torch.frombuffer(mapped, dtype=torch.uint8)
    _files.add(mapped, whole.data_ptr(), whole.data_ptr() + whole.nbytes)
    return whole[offset - begin :]


def drop_pages(*tensors: Tensor) -> None:
    """Releases the pages of contiguous tensors that have been read, if they are tensors from `map_file` or parts of
    them: they no longer count as this process's memory, and are read from the file again if they are used again. Other
    tensors stay as they are."""
    for tensor in tensors:
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        if tensor.device.type == "cpu" and tensor.is_contiguous() and _files.holds(begin, end):
            page = mmap.PAGESIZE
            _advise(begin // page * page, -(-end // page) * page, getattr(mmap, "MADV_DONTNEED", None))


def kept_copy(tensor: Tensor) -> Tensor:
    """A contiguous copy of a weight that stays. A contiguous weight in host memory is copied in pieces, and if it is a
    mapped file, the pages of each piece are dropped."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return tensor.detach().clone().contiguous()
    found = weight_memory(tensor.shape, tensor.dtype)
    for part, kept in zip(tensor.detach().flatten().split(COPIED), found.flatten().split(COPIED), strict=True):
        kept.copy_(part)
        drop_pages(part)
    return found
