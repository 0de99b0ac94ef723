"""How much memory the processes of this machine or container may use together."""

from __future__ import annotations

import os
from collections.abc import Iterator

from kernels.cgroups import cgroup_folders, read_text


def machine_memory() -> int:
    """The physical memory in bytes, or the smallest limit of this process's cgroups if that is lower. Files that are
    missing, cannot be read or hold no positive number set no limit."""
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_limits()])


def _limits() -> Iterator[int]:
    """https://docs.kernel.org/admin-guide/cgroup-v2.html, `memory.max`, and
    https://docs.kernel.org/admin-guide/cgroup-v1/memory.html, `memory.limit_in_bytes`."""
    for folder, version in cgroup_folders("memory"):
        limit = read_text(folder / ("memory.max" if version == 2 else "memory.limit_in_bytes"))
        # A limit of 0 cannot be in force: this process has memory.
        if limit.isdecimal() and int(limit) > 0:  # v2 says "max", v1 a huge number if there is none
            yield int(limit)
