"""File permissions for a thread of root, to which they do not apply."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

_VERSION_3 = 0x20080522
"""Of the structures of capset(2)."""
_FILES = 1 << 1 | 1 << 2
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH."""


@contextmanager
def permissions_apply() -> Iterator[None]:
    """Takes root's capabilities to ignore permissions from this thread, in which the context must also end."""
    libc = ctypes.CDLL(None, use_errno=True)
    head, sets = (ctypes.c_uint32 * 2)(_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    """`sets`: effective, permitted and inheritable, for the lower and the upper 32 capabilities."""

    def call(function: str) -> None:
        if getattr(libc, function)(head, sets):
            raise OSError(ctypes.get_errno(), f"{function}: {os.strerror(ctypes.get_errno())}")

    call("capget")
    before = sets[0]
    sets[0] &= ~_FILES
    call("capset")
    try:
        yield
    finally:
        sets[0] = before
        call("capset")
