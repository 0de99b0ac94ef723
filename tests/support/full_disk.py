"""A full disk, simulated by a limit on file sizes, for which the system rejects a write in the same way."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def file_size_limit(size: int, pid: int = 0) -> Iterator[None]:
    """A process, or this one, can write no file that is larger than `size` bytes, memory files included. What this one
    imports meanwhile is not compiled to files: Python 3.11 would leave truncated ones, which later imports fail on."""
    before, compiles = resource.prlimit(pid, resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = compiles
