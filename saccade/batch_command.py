"""`saccade batch`: exit code 0 if each row has its answer, 1 if some are errors, 2 if the job could not be done, 130
after an interrupt."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from typing import Any

from saccade.batch import BatchInvalid, BatchJob, BatchOptions, BatchSummary, run_sync
from saccade.client import Client, SyncClient
from saccade.errors import SaccadeError
from saccade.progress import Progress
from saccade.transport import TLSConfig


class _Shown:
    """The progress of a job, from its start on."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._progress: Progress | None = None

    def start(self, summary: BatchSummary) -> None:
        if summary.resumed:
            print(f"saccade: {summary.resumed} of {summary.total} rows are there already", file=sys.stderr)
        if not self._quiet:
            self._progress = Progress(summary.total, summary.resumed)

    def add(self, summary: BatchSummary, tokens: int, failed: bool) -> None:
        if self._progress is not None:
            self._progress.add(tokens, failed)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.close()


def run(options: argparse.Namespace) -> int:
    """Runs the command. Returns the exit code."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return _run(options)
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(options: argparse.Namespace) -> int:
    shown = _Shown(options.quiet)
    job = None
    try:
        job = BatchJob(
            options.input,
            options.output,
            BatchOptions(
                concurrency=options.concurrency,
                ordered=options.ordered,
                max_errors=options.max_errors,
                overwrite=options.overwrite,
                any_model=options.any_model,
                timeout=options.timeout,
                on_start=shown.start,
                on_progress=shown.add,
            ),
        )
        job.check()
        try:
            with _client(options) as client:
                summary = run_sync(client, job)
        finally:
            shown.close()
    except KeyboardInterrupt:
        print("saccade: interrupted; the same command goes on from here", file=sys.stderr)
        _print(job)
        return 130
    except BatchInvalid as error:
        for problem in error.problems or [error.message]:
            print(f"{options.input}: {problem}" if error.problems else f"saccade: {problem}", file=sys.stderr)
        return 2
    except SaccadeError as error:
        print(f"saccade: {error}", file=sys.stderr)
        _print(job)
        return 2
    _print(job)
    return 1 if summary.failed else 0


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _print(job: BatchJob | None) -> None:
    if job is not None and job.summary.total:
        print(json.dumps(job.summary.to_dict()), flush=True)


def _client(options: argparse.Namespace) -> SyncClient:
    if options.model is not None:
        from saccade.local import LocalClient

        return LocalClient(options.model)
    tls = TLSConfig(ca=options.ca) if options.ca else options.tls
    return Client(options.server, tls=tls, max_retries=options.max_retries)
