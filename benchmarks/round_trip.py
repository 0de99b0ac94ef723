"""The time that a message takes from one core to another and back.

It shows whether the cores share a cache: on an EPYC, 80 to 110 ns if they do and about 500 ns if not. A host may move a
virtual machine's cores within seconds, and operations that read what another core wrote then take up to twice as long.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import tempfile
from pathlib import Path

from kernels.native import NativeUnavailable
from kernels.native.compiler import find_compiler

SOURCE = Path(__file__).with_suffix(".cpp")
TRIPS = 4000


def round_trip() -> float | None:
    """Seconds, the best of `TRIPS / 200` measurements. None without a second core or a compiler."""
    if len(os.sched_getaffinity(0)) < 2:
        return None
    try:
        return float(_library().round_trip_seconds(TRIPS))
    except NativeUnavailable:
        return None


@functools.cache
def _library() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory(prefix="saccade-round-trip-") as folder:
        path = Path(folder) / "round_trip.so"
        command = [find_compiler(), "-std=c++17", "-O2", "-shared", "-fPIC", "-pthread", str(SOURCE), "-o", str(path)]
        subprocess.run(command, check=True, capture_output=True)
        found = ctypes.CDLL(str(path))
    found.round_trip_seconds.argtypes = [ctypes.c_long]
    found.round_trip_seconds.restype = ctypes.c_double
    return found
