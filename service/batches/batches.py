"""Schedules batches, reports their states, and handles shutdowns and restarts.

validating -> running -> completed, failed or cancelled. Up to `jobs` batches run at a time, oldest first and one per
tenant, so that a hundred batches of one tenant do not delay the first one of another. A shutdown does not change
states: unfinished batches are read again when the server starts, and continue with the rows that are not in their
output.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from saccade._jobs.input import BatchInvalid
from saccade._jobs.job import BatchSummary
from saccade.errors import SaccadeError
from saccade.types import Model
from service.answers.calls import Calls
from service.batches.batch_runs import Inside, Uploaded, counts_of_files, run_batch
from service.batches.batch_store import BatchRecord, BatchStore
from service.batches.kept_media import KeptMedia
from service.common import errors
from service.common.auth import Tenant
from service.common.limits import ByteBudget

log = logging.getLogger(__name__)

WATCH_SECONDS = 0.2
"""Shortest time between two states that `watch` yields, in seconds, but for the last one."""


@dataclass(frozen=True)
class BatchLimits:
    """How much of the server batches may use."""

    concurrency: int
    """Rows of all batches together that are in progress."""
    jobs: int
    """Batches that run at a time."""
    row_timeout: float
    """Seconds that a row may take, all attempts together."""
    media_ttl: float
    """Seconds after which uploaded media expire unless they are renewed."""


class Batches:
    """Runs the batches of a store. All methods run on the event loop."""

    def __init__(
        self, store: BatchStore, calls: Calls, model: Model, limits: BatchLimits, *,
        budget: ByteBudget, tenant: Callable[[str], Tenant | None], folder: Callable[[Tenant], Uploaded],
    ) -> None:  # fmt: skip
        """`budget`: limits the bytes that rows hold while they run. `tenant`: finds a tenant by name; None if no key
        has this name and the scope `batch` any more. `folder`: resolves the images that a tenant's rows may refer
        to."""
        self.store = store
        self._calls, self._model, self._limits = calls, model, limits
        self._budget, self._find_tenant, self._folder = budget, tenant, folder
        self._gate = asyncio.Semaphore(limits.concurrency)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._cancelled: set[str] = set()
        self._changes: dict[str, asyncio.Event] = {}
        self._keeper: asyncio.Task[None] | None = None
        self._media = KeptMedia(store, limits.media_ttl, tenant, folder)
        self._stopped = False

    def start(self) -> None:
        """Continues the batches that an earlier run has left."""
        if waiting := self.store.unfinished():
            log.info("continuing %d batches of an earlier run", len(waiting))
        self._keeper = asyncio.create_task(self._media.run())
        self._pump()

    async def stop(self) -> None:
        """Stops all work; unfinished batches continue when the server starts again. Idempotent."""
        self._stopped = True
        tasks = [*self._tasks.values(), *([self._keeper] if self._keeper is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- called by servicers -------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raises Unavailable after `stop`, because a new batch would be stored and not started."""
        if self._stopped:
            raise errors.draining()

    def created(self) -> None:
        """To be called when there may be a new batch in the store."""
        self._media.created()
        self._pump()

    async def cancel(self, tenant: str, batch_id: str) -> BatchRecord:
        """Cancels a batch and returns it when it has ended; one that had ended before is unchanged. Raises NotFound."""
        record = self.store.get(tenant, batch_id)
        if not record.over and batch_id not in self._cancelled:
            self._cancelled.add(batch_id)
            if (task := self._tasks.get(batch_id)) is not None:
                task.cancel()
            else:
                self._begin(record)
        while (task := self._tasks.get(batch_id)) is not None:
            await asyncio.wait({task})
        return self.store.get(tenant, batch_id)

    async def delete(self, tenant: str, batch_id: str) -> None:
        """Deletes a batch. Raises NotFound, and FailedPrecondition for one that has not ended."""
        record = self.store.get(tenant, batch_id)
        if not record.over:
            raise errors.FailedPrecondition(
                f"batch {batch_id} is {record.state}; cancel it first", reason="BATCH_RUNNING"
            )
        await asyncio.to_thread(self.store.delete, record)
        self._changed(batch_id)

    async def watch(self, tenant: str, batch_id: str) -> AsyncGenerator[BatchRecord, None]:
        """Yields the batch now and after each change, until it has ended. Raises NotFound."""
        last = None
        while True:
            record = self.store.get(tenant, batch_id)
            if record.over:
                yield record
                return
            change = self._changes.setdefault(batch_id, asyncio.Event())
            if record != last:
                yield record
                last = record
            await change.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH_SECONDS):
                    while not self.store.get(tenant, batch_id).over:
                        await self._changes.setdefault(batch_id, asyncio.Event()).wait()

    def _changed(self, batch_id: str) -> None:
        if (change := self._changes.pop(batch_id, None)) is not None:
            change.set()

    # -- running -------------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Starts the next batches."""
        busy = {record.tenant for record in self.store.unfinished() if record.batch_id in self._tasks}
        for record in self.store.unfinished():
            if self._stopped or len(self._tasks) >= self._limits.jobs:
                return
            if record.tenant not in busy and record.batch_id not in self._tasks:
                busy.add(record.tenant)
                self._begin(record)

    def _begin(self, record: BatchRecord) -> None:
        task = self._tasks[record.batch_id] = asyncio.create_task(self._run(record))
        task.add_done_callback(lambda _: self._left(record.batch_id))

    def _left(self, batch_id: str) -> None:
        """Called when a batch's task has ended, or was cancelled before its first step. In the latter case the state
        does not say yet that the batch was cancelled, so another task is started, which records it."""
        del self._tasks[batch_id]
        record = next((record for record in self.store.unfinished() if record.batch_id == batch_id), None)
        if record is not None and batch_id in self._cancelled and not self._stopped:
            self._begin(record)
        else:
            self._cancelled.discard(batch_id)
            self._pump()

    async def _run(self, record: BatchRecord) -> None:
        try:
            if record.batch_id in self._cancelled:
                raise asyncio.CancelledError
            await self._answer(record)
        except asyncio.CancelledError:
            if record.batch_id in self._cancelled:
                await self._end(self.store.get(record.tenant, record.batch_id), "cancelled")
        except BatchInvalid as error:
            await self._fail(record, error.reason, error.message, problems=tuple(error.problems))
        except SaccadeError as error:
            await self._fail(record, error.reason or type(error).__name__, error.message)
        except errors.StatusError as error:
            await self._fail(record, error.reason, error.message)
        except Exception:
            log.exception("batch %s failed", record.batch_id)
            await self._fail(record, "INTERNAL", "the server failed on this batch; its log has the details")

    async def _answer(self, record: BatchRecord) -> None:
        loop = asyncio.get_running_loop()

        def tenant() -> Tenant:
            if (found := self._find_tenant(record.tenant)) is None:
                raise errors.PermissionDenied(
                    f"{record.tenant!r} no longer has a key with the scope 'batch'", reason="KEY_REVOKED"
                )
            return found

        def on_start(summary: BatchSummary) -> None:
            loop.call_soon_threadsafe(self._update, record.batch_id, _counts(summary))

        def on_row(summary: BatchSummary) -> None:
            loop.call_soon_threadsafe(self._count, record.batch_id, _counts(summary))

        await self._save(replace(record, state="validating", started=record.started or time.time()))
        client = Inside(self._calls, self._model, tenant, self._gate, self._limits.row_timeout, self._budget)
        summary = await run_batch(
            self.store, record, client, self._folder(tenant()), concurrency=self._limits.concurrency,
            on_start=on_start, on_row=on_row,
        )  # fmt: skip
        self._update(record.batch_id, _counts(summary))
        await self._end(self.store.get(record.tenant, record.batch_id), "completed")

    def _update(self, batch_id: str, values: dict[str, Any]) -> None:
        """Stores the totals when the job has counted the rows."""
        self.store.save(replace(self.store.record(batch_id), state="running", **values), on_disk=False)
        self._changed(batch_id)

    def _count(self, batch_id: str, values: dict[str, Any]) -> None:
        """Stores the counts after a row, whatever the batch's state is by then. After a restart, rows are counted from
        the journal."""
        if batch_id in self._tasks:
            self.store.save(replace(self.store.record(batch_id), **values), on_disk=False)
            self._changed(batch_id)

    async def _fail(self, record: BatchRecord, reason: str, message: str, problems: tuple[str, ...] = ()) -> None:
        message = _without(self.store.folder(record.batch_id), message).removeprefix("input.jsonl: ")
        record = self.store.get(record.tenant, record.batch_id)
        await self._end(record, "failed", reason=reason, message=message, problems=problems)

    async def _end(self, record: BatchRecord, state: str, **values: Any) -> None:
        size = await asyncio.to_thread(self.store.output_size, record.batch_id)
        if size and not record.total:
            values |= await asyncio.to_thread(counts_of_files, self.store, record)
            size = await asyncio.to_thread(self.store.output_size, record.batch_id)
        await self._save(replace(record, state=state, ended=time.time(), output_bytes=size, **values))

    async def _save(self, record: BatchRecord) -> None:
        await asyncio.to_thread(self.store.save, record)
        self._changed(record.batch_id)


def _without(folder: Path, message: str) -> str:
    """An error of a batch's job without the folder of its files, which is not the caller's concern."""
    return message.replace(f"{folder}{os.sep}", "")


def _counts(summary: BatchSummary) -> dict[str, Any]:
    return {
        "total": summary.total, "completed": summary.completed, "failed": summary.failed,
        "prompt_tokens": summary.prompt_tokens, "completion_tokens": summary.completion_tokens,
        "cached_tokens": summary.cached_tokens, "reasoning_tokens": summary.reasoning_tokens,
        "model": summary.model, "version": summary.model_version,
    }  # fmt: skip
