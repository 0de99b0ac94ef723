"""Limits on the descriptors of the test's process."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

NO_MORE = 3
"""A limit at which the process keeps the descriptors that it has and gets no further ones."""


@contextmanager
def limited_descriptors(soft: int) -> Iterator[None]:
    """This soft limit for the process and those that it starts."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
