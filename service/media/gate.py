"""A limit on bytes held by requests on the event loop: requests that do not fit wait in order of arrival."""

from __future__ import annotations

import asyncio
from collections import deque


class Grant:
    """The bytes that one request holds."""

    def __init__(self, gate: ByteGate, size: int) -> None:
        self._gate, self._size = gate, size

    def shrink(self, size: int) -> None:
        """Releases the bytes above `size`."""
        freed = max(0, self._size - size)
        self._size -= freed
        self._gate._free(freed)

    def release(self) -> None:
        """Releases everything. Idempotent."""
        self.shrink(0)


class ByteGate:
    """A limit of `capacity` bytes. Used on one event loop."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def acquire(self, size: int) -> Grant:
        """Waits until `size` bytes are free. A request for more than the whole capacity is granted when no other
        request holds any."""
        assert size >= 0, size
        size = min(size, self.capacity)
        if not size:
            return Grant(self, 0)
        if self._waiting or not self._fits(size):
            future = asyncio.get_running_loop().create_future()
            entry = (size, future)
            self._waiting.append(entry)
            try:
                await future
            except asyncio.CancelledError:
                granted = future.done() and not future.cancelled()  # cancelled just after the bytes were granted
                if entry in self._waiting:
                    self._waiting.remove(entry)
                self._free(size if granted else 0)  # later requests may fit now
                raise
        else:
            self.used += size
        return Grant(self, size)

    def _fits(self, size: int) -> bool:
        return self.used + size <= self.capacity

    def _free(self, size: int) -> None:
        self.used -= size
        while self._waiting and self._fits(self._waiting[0][0]):
            size, future = self._waiting.popleft()
            if not future.cancelled():
                self.used += size
                future.set_result(None)
