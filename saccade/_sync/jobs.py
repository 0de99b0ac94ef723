# Generated from saccade/_async/jobs.py by `make sdk`. Do not edit.
"""A job over files, run by a client."""

from __future__ import annotations

from contextlib import closing
from typing import Protocol

from saccade._jobs.job import BatchJob, BatchSummary
from saccade._map.threads import Answers, Worker, map_requests
from saccade.types import Model


class JobClient(Answers, Protocol):
    """The part of a client that a job needs."""

    def get_model(self) -> Model: ...


def run_job(client: JobClient, job: BatchJob) -> BatchSummary:
    """Runs a job until it is finished or fails. Raises SaccadeError."""
    worker = Worker()
    try:
        worker.run(job.check)
        worker.run(job.open, client.get_model())
        options = job.options
        with (
            closing(worker.read(job.rows())) as rows,
            closing(
                map_requests(client, rows, job.prepare, concurrency=options.concurrency, ordered=options.ordered)
            ) as results,
        ):
            for _, row, result in results:
                worker.run(job.take, row, result)
        return worker.run(job.finish)
    finally:
        worker.run(job.close)
        worker.end()
