"""Limits the time that a thread waits in gRPC's blocking iterator, whose only limit is the call's timeout."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any


class Watchdog:
    """Cancels a call unless it is disarmed in time. Its thread starts with the first `arm`, does not keep the call
    alive and ends with the call.

    Arming does not wake the thread if deadlines only increase: it reads the clock when the earliest deadline has
    passed.
    """

    def __init__(self, call: Any) -> None:
        self.expired = False
        self._call = weakref.ref(call, lambda _: self.stop())
        # Reentrant, since the garbage collector may call `stop` inside any of these methods.
        self._changed = threading.Condition(threading.RLock())
        self._due: float | None = None
        self._wakes = float("inf")
        self._stopped = False
        self._thread: threading.Thread | None = None

    def arm(self, seconds: float) -> None:
        with self._changed:
            self._due = time.monotonic() + seconds
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="saccade-watchdog", daemon=True)
                self._thread.start()
            elif self._due < self._wakes:
                self._changed.notify()

    def disarm(self) -> None:
        with self._changed:
            self._due = None

    def stop(self) -> None:
        """Ends the thread. Idempotent."""
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def _watch(self) -> None:
        with self._changed:
            while not self._stopped:
                left = None if self._due is None else self._due - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._wakes = float("inf") if self._due is None else self._due
                self._changed.wait(left)
            if self._stopped:
                return
            self.expired = True
        call = self._call()
        if call is not None:
            call.cancel()
