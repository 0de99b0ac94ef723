"""The descriptors of the test's process, and limits on them."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

NO_MORE = 3
"""A limit at which the process keeps the descriptors that it has and gets no further ones."""


def open_descriptors() -> int:
    """How many there are. Only on systems with /proc."""
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def limited_descriptors(soft: int) -> Iterator[None]:
    """This soft limit for the process and those that it starts."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
