"""Waits for other processes."""

from __future__ import annotations

import array
import fcntl
import os
import select
import termios
import time
from typing import Any


def sent_to(worker: Any, timeout: float = 30.0) -> None:
    """Waits until a command has been written to an image worker that does not read, so that the worker owns it."""
    deadline = time.monotonic() + timeout
    unread = array.array("i", [0])
    while not unread[0]:
        assert time.monotonic() < deadline, "nothing was sent"
        time.sleep(0.002)
        fcntl.ioctl(worker._connection, termios.TIOCOUTQ, unread)


def ended(pid: int) -> None:
    """Waits until a process has ended, of which this one need not be the parent."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([descriptor], [], [], 60)[0]
    finally:
        os.close(descriptor)
