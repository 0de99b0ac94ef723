"""`saccade batch`. Exit code 0 if each row has its answer, 1 if some are errors, 2 if the job failed, 130 after an
interrupt."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from saccade._jobs.input import BatchInput, BatchInvalid
from saccade._jobs.job import CONCURRENCY, BatchJob, BatchOptions, BatchSummary
from saccade._jobs.journal import check_apart, real_output
from saccade._jobs.rows import ImageFolder
from saccade._sync.client import Client
from saccade._sync.jobs import run_job
from saccade._sync.methods import Methods
from saccade.connection_options import tls_settings
from saccade.errors import AlreadyExists, FailedPrecondition, InvalidArgument, SaccadeError
from saccade.progress import Progress
from saccade.types import Batch

_ONLY_HERE = {
    "concurrency": "the server's --batch-concurrency limits the rows in progress",
    "timeout": "the server's --batch-row-timeout limits a row",
    "any_model": "the server answers only rows that name its model or none",
}
"""Options that a batch on the server does not have, and why."""


class _Shown:
    """Shows the progress of a job."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._progress: Progress | None = None
        self._tokens = 0

    def start(self, summary: BatchSummary) -> None:
        if summary.resumed:
            with suppress(OSError):
                print(f"saccade: {summary.resumed} of {summary.total} rows have been answered already", file=sys.stderr)
        if not self._quiet:
            self._progress = Progress(summary.total, summary.resumed)

    def add(self, summary: BatchSummary, tokens: int, failed: bool) -> None:
        if self._progress is not None:
            self._progress.add(tokens, failed)

    def follow(self, batch: Batch) -> None:
        """Shows the state of a batch on the server."""
        if self._quiet or not batch.total:
            return
        if self._progress is None:
            self._progress = Progress(batch.total, batch.completed + batch.failed)
        tokens = batch.completion_tokens - self._tokens
        while self._progress.done < batch.completed + batch.failed:
            self._progress.add(tokens, self._progress.failed < batch.failed)
            tokens = 0
        self._tokens = batch.completion_tokens

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
    if options.server_side:
        return _run_server_side(options)
    shown = _Shown(options.quiet)
    job = None
    try:
        job = BatchJob(
            options.input,
            options.output,
            BatchOptions(
                concurrency=CONCURRENCY if options.concurrency is None else options.concurrency,
                ordered=options.ordered,
                max_errors=options.max_errors,
                overwrite=options.overwrite,
                any_model=options.any_model,
                strict=options.strict,
                timeout=options.timeout,
                on_start=shown.start,
                on_progress=shown.add,
            ),
        )
        job.check()
        try:
            with _client(options) as client:
                summary = run_job(client, job)
        finally:
            shown.close()
    except KeyboardInterrupt:
        print("saccade: interrupted; the same command continues from here", file=sys.stderr)
        _print(job)
        return 130
    except BatchInvalid as error:
        _print_problems(options, error)
        return 2
    except SaccadeError as error:
        print(f"saccade: {error}", file=sys.stderr)
        _print(job)
        return 2
    _print(job)
    return 1 if summary.failed else 0


def _print_problems(options: argparse.Namespace, error: BatchInvalid) -> None:
    for problem in error.problems or [error.message]:
        print(f"{options.input}: {problem}" if error.problems else f"saccade: {problem}", file=sys.stderr)


def _run_server_side(options: argparse.Namespace) -> int:
    try:
        batch = _server_side_batch(options)
    except BatchInvalid as error:
        _print_problems(options, error)
        return 2
    except KeyboardInterrupt:
        print("saccade: interrupted; the server continues, and the same command finds the batch again", file=sys.stderr)
        return 130
    except SaccadeError as error:
        print(f"saccade: {error}", file=sys.stderr)
        return 2
    return 2 if batch.state != "completed" else 1 if batch.failed else 0


def _server_side_batch(options: argparse.Namespace) -> Batch:
    """The batch at its end, after its answers have been downloaded. The same command finds the same batch again: its id
    is a hash of the file and of the command's options."""
    if options.model is not None:
        raise InvalidArgument("--model: it loads a model here, and --server-side needs a server; give only one")
    for name, why in _ONLY_HERE.items():
        if getattr(options, name) not in (None, False):
            raise InvalidArgument(f"--{name.replace('_', '-')} is not for --server-side: {why}")
    fingerprint, shown = _fingerprint(options), _Shown(options.quiet)
    target = _Target(Path(options.input), Path(options.output), fingerprint, options.overwrite)
    with _server(options) as client:
        create = partial(
            client.batches.create, options.input, ordered=options.ordered, max_errors=options.max_errors,
            request_id=fingerprint,
        )  # fmt: skip
        created = create()
        if options.overwrite and created.state in ("failed", "cancelled"):
            client.batches.delete(created.batch_id)
            created = create()
        try:
            for batch in client.batches.watch(created.batch_id):
                shown.follow(batch)
        finally:
            shown.close()
        if batch.problems:
            for problem in batch.problems:
                print(f"{options.input}: {problem}", file=sys.stderr)
        elif batch.state != "completed":
            print(f"saccade: batch {batch.batch_id} {batch.state}: {batch.message}", file=sys.stderr)
            print("saccade: --overwrite starts it again from the first row", file=sys.stderr)
        if batch.output_bytes:
            target.begin(batch.batch_id)
            client.batches.download(batch.batch_id, options.output, resume=True)
        print(json.dumps(asdict(batch)), flush=True)
        return batch


class _Target:
    """The output of a server-side batch, and a file next to it with the batch's id, so that the same command can be
    repeated and an interrupted download resumed. The output is checked before the server is called.

    Raises:
        AlreadyExists: the output contains something else.
        BatchInvalid: the output contains something else, and the input has invalid lines.
        FailedPrecondition: the output cannot be written.
        InvalidArgument: the input would be overwritten.
    """

    def __init__(self, source: Path, output: Path, fingerprint: str, overwrite: bool) -> None:
        self._output, self._fingerprint = real_output(output), fingerprint
        self._mark = self._output.with_name(self._output.name + ".batch")
        check_apart(source, (self._output, self._mark))
        self._held = None if overwrite else self._marked()
        if output.exists() and self._held is None and not overwrite:
            BatchInput(source, ImageFolder(None)).close()
            raise AlreadyExists(
                f"{str(output)!r} exists and is not this job's output; name another one, or use --overwrite",
                reason="BATCH_OUTPUT_FOREIGN",
            )
        if not os.access(self._output if output.exists() else self._output.parent, os.W_OK):
            raise FailedPrecondition(f"cannot write {str(output)!r}")

    def _marked(self) -> str | None:
        """The batch whose answers the output has, if this command created it."""
        try:
            mark = json.loads(self._mark.read_text("utf-8"))
            return str(mark["batch_id"]) if mark["request_id"] == self._fingerprint else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def begin(self, batch_id: str) -> None:
        """Prepares the output for appending; deletes answers of another batch."""
        if batch_id == self._held:
            return
        try:
            self._output.unlink(missing_ok=True)
            self._mark.write_text(json.dumps({"request_id": self._fingerprint, "batch_id": batch_id}), "utf-8")
        except OSError as error:
            raise FailedPrecondition(f"cannot write {error.filename or str(self._mark)!r}: {error.strerror}") from error


def _fingerprint(options: argparse.Namespace) -> str:
    digest = hashlib.sha256(f"{options.ordered}\0{options.max_errors}\0".encode())
    try:
        with open(options.input, "rb") as file:
            while chunk := file.read(2**20):
                digest.update(chunk)
    except OSError as error:
        raise InvalidArgument(f"cannot read {options.input!r}: {error.strerror}") from error
    return f"saccade-batch-{digest.hexdigest()}"


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _print(job: BatchJob | None) -> None:
    if job is not None and job.summary.total:
        print(json.dumps(job.summary.to_dict()), flush=True)


def _client(options: argparse.Namespace) -> Methods:
    if options.model is not None:
        from saccade.local import LocalClient

        return LocalClient(options.model, adapter=options.adapter)
    return _server(options)


def _server(options: argparse.Namespace) -> Client:
    return Client(options.server, tls=tls_settings(options), max_retries=options.max_retries, affinity=options.affinity)
