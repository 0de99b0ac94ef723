"""Host memory of a process: memory that a step frees is kept for the next step, and tensors that steps read completely
are in huge pages."""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
    """Returns all freed pages to the system, once: after loading weights, of which temporary copies leave much more
    behind than steps need. Returns whether the allocator did so (glibc only)."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        return bool(ctypes.CDLL(None).malloc_trim(0))
    except (OSError, AttributeError):
        return False


HUGE = 2 << 20
"""Bytes of a huge page."""
LEAST_HUGE = 64 << 10
"""Smallest tensor, in bytes, that is worth huge pages."""
SHARED = 32 << 20
"""Bytes of a mapping that several tensors share; one that would take more than half of it has a mapping of its own."""


def use_huge_pages(tensor: Tensor) -> bool:
    """Asks for huge pages inside a tensor in host memory, preferably before it is first written.

    Weights and states are read completely in each step, which with pages of 4 KiB takes a page walk per 4 KiB: one core
    then reads 19 GB/s of weights instead of 29, and processes 30 GB/s of states instead of 41 (Zen 4). No more memory
    is used than the tensor fills. Returns whether the system accepted the advice, which it need not follow.
    """
    begin, end = -(-tensor.data_ptr() // HUGE) * HUGE, (tensor.data_ptr() + tensor.nbytes) // HUGE * HUGE
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if tensor.device.type != "cpu" or begin >= end or advice is None:
        return False
    try:
        madvise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return False
    return bool(madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice) == 0)


class _Mappings:
    """Memory for weights, apart from the C allocator's: there, weights between temporary copies leave gaps that nothing
    fills (measured 4 GB for 15 GB of weights). A mapping is unmapped when the last of its tensors is gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shared: Tensor | None = None
        self._used = 0

    def take(self, nbytes: int) -> Tensor:
        """uint8 `[nbytes]`, zeros, at a multiple of 64; a large one begins at a huge page."""
        if nbytes > SHARED // 2:
            return _mapped(nbytes)
        with self._lock:
            if self._shared is None or self._used + nbytes > SHARED:
                self._shared, self._used = _mapped(SHARED), 0
            begin, self._used = self._used, self._used + -(-nbytes // 64) * 64
            return self._shared[begin : begin + nbytes]


_mappings = _Mappings()


def _mapped(nbytes: int) -> Tensor:
    """uint8 `[nbytes]` in a mapping of its own, from the beginning of a huge page on."""
    import torch

    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    whole = torch.frombuffer(mmap.mmap(-1, nbytes + HUGE, **private), dtype=torch.uint8)  # unwritten pages cost nothing
    first = -whole.data_ptr() % HUGE
    found = whole[first : first + nbytes]
    use_huge_pages(found)
    return found


def in_huge_pages(tensor: Tensor) -> Tensor:
    """A copy of a contiguous tensor in host memory that lies in huge pages, as far as the system has them; the tensor
    itself if it is small."""
    if tensor.nbytes < LEAST_HUGE:
        return tensor
    assert tensor.is_contiguous()
    return _mappings.take(tensor.nbytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)
