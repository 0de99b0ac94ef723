"""The control groups of this process, whose limits apply to it: https://docs.kernel.org/admin-guide/cgroup-v2.html and
https://docs.kernel.org/admin-guide/cgroup-v1/cgroups.html."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/proc/self/cgroup")
"""Lines of ID:CONTROLLERS:PATH; v2 has the id 0 and no controllers."""
MOUNTS = Path("/sys/fs/cgroup")
"""The folder in which the cgroup file systems are mounted."""


def cgroup_folders(controller: str) -> Iterator[tuple[Path, int]]:
    """Folders of this process's cgroups and of all of their ancestors, each of whose limits applies, and the version (1
    or 2) that decides the names of their files. Folders and files may be missing, which sets no limit."""
    for line in read_text(CGROUPS).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            mounts, version = [MOUNTS / controller], 1
        elif number == "0" and not controllers:  # with some v1 controllers, v2 is mounted in `unified`
            mounts, version = [MOUNTS, MOUNTS / "unified"], 2
        else:
            continue
        # A container may see its own cgroup as the root of the mount while `path` is that of the host, and a process
        # outside of its namespace's root has a path with "..": folders that do not exist set no limit.
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        for mount in mounts:
            for depth in range(len(parts) + 1):
                yield mount.joinpath(*parts[:depth]), version


def read_text(file: Path) -> str:
    """The stripped text of a file; empty if it is missing, cannot be read or is no text."""
    try:
        return file.read_text("utf-8").strip()
    except (OSError, ValueError):  # ValueError: not UTF-8, or a path with a NUL
        return ""
