"""A semaphore for which tenants take turns."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class TenantSemaphore:
    """`places` at a time, for callers on one event loop. A free place goes to the next tenant that waits, and to the
    caller of this tenant that has waited longest, so that one with many callers does not delay those of others."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: dict[bytes, deque[asyncio.Future[None]]] = {}
        """By tenant; the one whose turn is next comes first."""

    @asynccontextmanager
    async def hold(self, tenant: bytes) -> AsyncIterator[None]:
        """Holds a place during the context, after waiting for it. Can be cancelled."""
        if self._free:
            self._free -= 1
        else:
            await self._turn(tenant)
        try:
            yield
        finally:
            self._free += 1
            self._give()

    async def _turn(self, tenant: bytes) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it got its place before it was cancelled
                self._free += 1
                self._give()
            raise

    def _give(self) -> None:
        """Gives free places to those whose turn it is."""
        while self._free and self._waiting:
            tenant = next(iter(self._waiting))
            queue = self._waiting.pop(tenant)
            turn = queue.popleft()
            if queue:
                self._waiting[tenant] = queue
            if not turn.done():  # a cancelled one has left its turn
                self._free -= 1
                turn.set_result(None)
