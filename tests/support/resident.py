"""What is in memory: pages of a tensor, and of the files that a process maps."""

from __future__ import annotations

import ctypes
import functools
import mmap
import subprocess
import sys
from pathlib import Path

import torch


def pages_in_memory(tensor: torch.Tensor) -> int:
    """Number of a tensor's pages that are in memory, counted from the page of its first byte. Linux only."""
    begin = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    found = (ctypes.c_ubyte * -(-tensor.nbytes // mmap.PAGESIZE))()
    assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), ctypes.c_size_t(tensor.nbytes), found)
    return sum(byte & 1 for byte in found)


def file_bytes(pid: int | str = "self") -> int:
    """Bytes of files, such as libraries, that a process has in memory. Linux only."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssFile")) << 10


@functools.cache
def file_bytes_after_import(module: str) -> int:
    """`file_bytes` of a process that has only imported a module."""
    program = "from service.common.helper_process import torch_imports\n"
    program += f"with torch_imports(): import {module}\nprint(*open('/proc/self/status'))"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    return next(int(line.split()[1]) for line in told.stdout.splitlines() if line.strip().startswith("RssFile")) << 10
