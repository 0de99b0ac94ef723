"""Waits for other processes."""

from __future__ import annotations

import array
import fcntl
import os
import select
import signal
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def until(condition: Callable[[], bool], timeout: float = 60.0) -> None:
    """Waits until the condition holds, for something that cannot be waited for otherwise."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout:g} s"
        time.sleep(0.002)


def stop(pid: int) -> None:
    """Stops a process and waits until it stands still. The signal goes to its main thread, and until that gets a core,
    the other threads run on."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")


def sent_to(worker: Any, timeout: float = 30.0) -> None:
    """Waits until a command has been written to an image worker that does not read, so that the worker owns it."""
    unread = array.array("i", [0])

    def is_sent() -> bool:
        fcntl.ioctl(worker._connection, termios.TIOCOUTQ, unread)
        return unread[0] > 0

    until(is_sent, timeout)


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
