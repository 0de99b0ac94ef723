"""How long one step of an event loop keeps all others waiting, told so that a loaded machine changes nothing.

What is measured is the processor time that the loop's thread spends in one callback: while it waits for a core, or for
the interpreter, its clock stands still. So a callback is charged with its own work alone.
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
    """Of the callbacks of one loop."""

    longest: float = 0.0
    """Seconds."""
    what: str = ""
    callbacks: int = 0


@contextmanager
def watched(loop: asyncio.AbstractEventLoop) -> Iterator[Pauses]:
    """Counts while the context lasts. Old objects of this process are kept from the collector, which would otherwise
    look at all that the tests before have imported, in the middle of some callback."""
    pauses, original = Pauses(), asyncio.Handle._run  # type: ignore[attr-defined]
    thread = getattr(loop, "_thread_id", None)
    assert thread is not None, "the loop does not run"

    def run(handle: asyncio.Handle) -> None:
        if threading.get_ident() != thread:
            original(handle)
            return
        callback = handle._callback  # type: ignore[attr-defined]
        described = repr(getattr(callback, "__self__", callback))[:300]  # a task says which one it is
        before = time.thread_time()
        original(handle)
        seconds = time.thread_time() - before
        pauses.callbacks += 1
        if seconds > pauses.longest:
            pauses.longest, pauses.what = seconds, described

    gc.collect()
    gc.freeze()
    asyncio.Handle._run = run  # type: ignore[attr-defined]
    try:
        yield pauses
    finally:
        asyncio.Handle._run = original  # type: ignore[attr-defined]
        gc.unfreeze()
