"""Queues and places for which tenants take turns, so that one with much work does not delay that of others."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class TenantQueue(Generic[T]):
    """A queue from which each tenant in turn gets its oldest item. Not thread-safe."""

    def __init__(self) -> None:
        self._items: dict[bytes, deque[T]] = {}
        """By tenant; the one whose turn is next comes first."""

    def __bool__(self) -> bool:
        return bool(self._items)

    def put(self, tenant: bytes, item: T) -> None:
        self._items.setdefault(tenant, deque()).append(item)

    def get(self) -> T:
        """Removes the next item of a queue that is not empty."""
        tenant = next(iter(self._items))
        items = self._items.pop(tenant)
        item = items.popleft()
        if items:
            self._items[tenant] = items
        return item


class TenantSemaphore:
    """`places` at a time, for callers on one event loop."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting = TenantQueue[asyncio.Future[None]]()

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
            self._release()

    async def _turn(self, tenant: bytes) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.put(tenant, turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it got its place before it was cancelled
                self._release()
            raise

    def _release(self) -> None:
        """Gives a place to the next one that waits and was not cancelled."""
        self._free += 1
        while self._free and self._waiting:
            if not (turn := self._waiting.get()).done():
                self._free -= 1
                turn.set_result(None)
