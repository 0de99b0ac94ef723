"""Limits that a process sets for itself before it reads untrusted input."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal

DESCRIPTORS = 1 << 16
"""Enough for the connections of all clients and the images of all requests."""
START_BYTES = 8 << 30
"""Memory that the process is assumed to have mapped if it cannot be measured."""
LARGEST = 2**63 - 1
"""The largest value of a limit."""


def confine(memory_bytes: int) -> None:
    """Limits this process for the rest of its life: to `memory_bytes` beyond what is mapped already, and to no core
    dumps."""
    try:
        with open("/proc/self/statm") as file:
            mapped = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # where /proc is not mounted
        mapped = START_BYTES
    limit = _at_most(mapped + memory_bytes, resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # where /proc is not mounted
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # the kernel kills this process first if the machine runs out of memory


def allow_descriptors() -> None:
    """Raises this process's soft limit on descriptors, and that of processes that it starts, to `DESCRIPTORS` or as far
    as it may: the usual 1,024 are meant for programs that call `select`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _at_most(DESCRIPTORS, resource.RLIMIT_NOFILE)
    if 0 <= soft < wanted:  # -1: there is no limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def allow_seconds(seconds: float) -> None:
    """Lets the kernel end the process (SIGXCPU) when it has used `seconds` of processor time from now on, or up to two
    seconds more: the limit is a whole number."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    end = _at_most(int(usage.ru_utime + usage.ru_stime + seconds) + 2, resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (end, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def end_with_parent(parent: int) -> None:
    """Lets the kernel kill this process when the process `parent`, which has forked it, ends."""
    PR_SET_PDEATHSIG = 1  # from linux/prctl.h
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above took effect
        os._exit(1)


def _at_most(value: int, kind: int) -> int:
    """The value, or the process's hard limit, which it may not raise, if that is lower."""
    hard = resource.getrlimit(kind)[1]
    return min(value, LARGEST if hard == resource.RLIM_INFINITY else hard)
