"""Which pages of a tensor are in memory."""

from __future__ import annotations

import ctypes
import mmap

import torch


def pages_in_memory(tensor: torch.Tensor) -> int:
    """Number of the pages from that of the tensor's beginning on. Linux only."""
    begin = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    found = (ctypes.c_ubyte * -(-tensor.nbytes // mmap.PAGESIZE))()
    assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), ctypes.c_size_t(tensor.nbytes), found)
    return sum(byte & 1 for byte in found)
