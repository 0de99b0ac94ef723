"""A job over files, run by a client."""

from __future__ import annotations

from contextlib import aclosing
from typing import Protocol

from saccade._jobs.job import BatchJob, BatchSummary
from saccade._map.tasks import AsyncAnswers, AsyncWorker, map_requests_async
from saccade.types import Model


class AsyncJobClient(AsyncAnswers, Protocol):
    """The part of a client that a job needs."""

    async def get_model(self) -> Model: ...


async def run_job(client: AsyncJobClient, job: BatchJob) -> BatchSummary:
    """Runs a job until it is finished or fails. Raises SaccadeError."""
    worker = AsyncWorker()
    try:
        await worker.run(job.check)
        await worker.run(job.open, await client.get_model())
        options = job.options
        async with (
            aclosing(worker.read(job.rows())) as rows,
            aclosing(
                map_requests_async(client, rows, job.prepare, concurrency=options.concurrency, ordered=options.ordered)
            ) as results,
        ):
            async for _, row, result in results:
                await worker.run(job.take, row, result)
        return await worker.run(job.finish)
    finally:
        await worker.run(job.close)
        worker.end()
