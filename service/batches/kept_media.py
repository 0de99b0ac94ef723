"""Keeps the uploaded media of unfinished batches, which would expire before their rows are sent."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable

from service.batches.batch_runs import Uploaded
from service.batches.batch_store import BatchRecord, BatchStore
from service.common.auth import Tenant

log = logging.getLogger(__name__)


class KeptMedia:
    """Renews the media of all unfinished batches, also of those that wait for their turn."""

    def __init__(
        self, store: BatchStore, ttl: float, tenant: Callable[[str], Tenant | None],
        folder: Callable[[Tenant], Uploaded],
    ) -> None:  # fmt: skip
        """`ttl`: seconds after which media expire unless they are renewed. `tenant`, `folder`: see `Batches`."""
        self._store, self._pause, self._find_tenant, self._folder = store, ttl / 3, tenant, folder
        self._news = asyncio.Event()

    def created(self) -> None:
        """To be called when there may be a new batch in the store."""
        self._news.set()

    async def run(self) -> None:
        """Never returns."""
        loop = asyncio.get_running_loop()
        kept: dict[str, float] = {}
        while True:
            self._news.clear()
            unfinished = self._store.unfinished()
            kept = {record.batch_id: kept.get(record.batch_id, -math.inf) for record in unfinished}
            for record in unfinished:
                if loop.time() - kept[record.batch_id] >= self._pause:
                    kept[record.batch_id] = loop.time()
                    await self._renew(record)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause):
                    await self._news.wait()

    async def _renew(self, record: BatchRecord) -> None:
        if (tenant := self._find_tenant(record.tenant)) is None:
            return
        source = self._store.folder(record.batch_id) / "input.jsonl"
        try:
            await asyncio.to_thread(self._folder(tenant).keep, source)
        except FileNotFoundError:
            pass  # the batch has ended and has been deleted meanwhile
        except OSError as error:
            log.error("batch %s: its media cannot be renewed: %s", record.batch_id, error.strerror)
