"""Measures how long one step of an event loop blocks all others, independently of the machine's load.

It measures the processor time that the loop's thread spends in one callback. That clock stands still while the thread
waits for a core or for the interpreter, so a callback is charged with its own work alone.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Pauses:
    """Pauses by the callbacks of one loop."""

    longest: float = 0.0
    """Seconds."""
    what: str = ""
    callbacks: int = 0


@contextmanager
def watched(loop: asyncio.AbstractEventLoop) -> Iterator[Pauses]:
    """Measures while the context lasts. Existing objects are frozen for the garbage collector, which would otherwise
    scan everything that earlier tests have made, inside some callback. They stay frozen, since
    collecting them takes 0.6 s."""
    pauses, original = Pauses(), asyncio.Handle._run  # type: ignore[attr-defined]
    thread = getattr(loop, "_thread_id", None)
    assert thread is not None, "the loop does not run"

    def run(handle: asyncio.Handle) -> None:
        if threading.get_ident() != thread:
            original(handle)
            return
        callback = handle._callback  # type: ignore[attr-defined]
        described = repr(getattr(callback, "__self__", callback))[:300]  # the name of a task shows which one it is
        before = time.thread_time()
        original(handle)
        seconds = time.thread_time() - before
        pauses.callbacks += 1
        if seconds > pauses.longest:
            pauses.longest, pauses.what = seconds, described

    gc.freeze()
    asyncio.Handle._run = run  # type: ignore[attr-defined]
    try:
        yield pauses
    finally:
        asyncio.Handle._run = original  # type: ignore[attr-defined]
