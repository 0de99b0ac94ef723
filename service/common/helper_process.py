"""Starts a helper: a process of this program on a socket pair, by module name and never by the caller's `__main__`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

SPINNING = {"GOMP_SPINCOUNT": "1000"}
"""How long a thread of libgomp's team spins before it sleeps: about as long as Python takes between two operations. Its
default is hundreds of times that, which gains a tenth on an idle machine (141 against 122 tokens/s at one request, 455
against 415 at eight), and on one where anything else is busy makes a step wait whole time slices for a thread that has
lost its core: measured up to fifty times slower."""


def start_helper(module: str) -> tuple[subprocess.Popen[bytes], Connection]:
    """`python -m module FD`, and this side of the socket pair whose other side is FD."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        root = str(Path(__file__).resolve().parent.parent.parent)
        path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**SPINNING, **os.environ, "PYTHONPATH": path},
        )
    finally:
        theirs.close()
    return process, Connection(ours.detach())
