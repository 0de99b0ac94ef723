"""How much memory the processes of this machine or container may use together.

cgroups: https://docs.kernel.org/admin-guide/cgroup-v2.html, `memory.max`, and
https://docs.kernel.org/admin-guide/cgroup-v1/memory.html, `memory.limit_in_bytes`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/proc/self/cgroup")
"""Lines of ID:CONTROLLERS:PATH; v2 has the id 0 and no controllers."""
MOUNTS = Path("/sys/fs/cgroup")
"""The folder in which the cgroup file systems are mounted."""


def machine_memory() -> int:
    """The physical memory in bytes, or the smallest limit of this process's cgroups if that is lower. Files that are
    missing, cannot be read or hold no positive number set no limit."""
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_limits(CGROUPS, MOUNTS)])


def _limits(cgroups: Path, mounts: Path) -> Iterator[int]:
    """The limits of this process's cgroups and of all of their ancestors, each of which applies."""
    for line in _read(cgroups).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            folders, name = [mounts / "memory"], "memory.limit_in_bytes"
        elif number == "0" and not controllers:  # with some v1 controllers, v2 is mounted in `unified`
            folders, name = [mounts, mounts / "unified"], "memory.max"
        else:
            continue
        # A container may see its own cgroup as the root of the mount while `path` is that of the host, and a process
        # outside of its namespace's root has a path with "..": folders that do not exist set no limit.
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        for folder in folders:
            for depth in range(len(parts) + 1):
                limit = _read(folder.joinpath(*parts[:depth], name)).strip()
                # A limit of 0 cannot be in force: this process has memory.
                if limit.isdecimal() and int(limit) > 0:  # v2 says "max", v1 a huge number if there is none
                    yield int(limit)


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, ValueError):  # ValueError: not UTF-8, or a path with a NUL
        return ""
