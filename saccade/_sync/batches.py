# Generated from saccade/_async/batches.py by `make sdk`. Do not edit.
"""`client.batches`: batches that the server processes in the background."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from saccade._core.batches import (
    Download,
    Messages,
    batch_from,
    cancel_steps,
    create_steps,
    delete_steps,
    get_steps,
    list_steps,
    watch_call,
)
from saccade._core.steps import Call
from saccade._sync.driver import run
from saccade._sync.session import Session
from saccade.types import Batch


class BatchMethods:
    """`client.batches`: files of requests in OpenAI's batch format that the server processes in the background.

    Images are data URLs or `media:ID`s of `client.media`. A batch survives a restart of the server, and runs with lower
    priority than all other calls.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def create(
        self,
        source: str | os.PathLike[str] | bytes,
        *,
        ordered: bool = False,
        max_errors: int | None = None,
        metadata: Mapping[str, str] | None = None,
        input_name: str = "",
        request_id: str = "",
        timeout: float | None = None,
    ) -> Batch:
        """Creates a batch from a file, given by its path or its content.

        Args:
            ordered: write the answers in the order of the requests; by default they are written as they complete.
            max_errors: the batch fails once it has more error rows than this; None: never.
            metadata: kept with the batch: at most 16 pairs, with keys of at most 64 and values of at most 512
                characters.
            input_name: the caller's name for the file, kept with the batch.
            request_id: a second call with the same id returns the batch that the first call has created.
        """
        return self._session._run(create_steps(source, ordered, max_errors, metadata, input_name, request_id), timeout)

    def get(self, batch_id: str, *, timeout: float | None = None) -> Batch:
        """The batch with this id. Raises NotFound."""
        return self._session._run(get_steps(batch_id), timeout)

    def list(self, *, timeout: float | None = None) -> list[Batch]:
        """All batches, newest first."""
        return self._session._run(list_steps(), timeout)

    def cancel(self, batch_id: str, *, timeout: float | None = None) -> Batch:
        """Cancels the batch. Answers that were finished before can still be downloaded."""
        return self._session._run(cancel_steps(batch_id), timeout)

    def delete(self, batch_id: str, *, timeout: float | None = None) -> None:
        """Deletes a finished batch. Raises FailedPrecondition while it is running."""
        self._session._run(delete_steps(batch_id), timeout)

    def watch(self, batch_id: str) -> Generator[Batch, None, None]:
        """Yields the batch now and after each change, until it has ended. Survives restarts of the server."""
        with closing(self._messages(lambda: watch_call(batch_id))) as messages:
            for message in messages:
                batch = batch_from(message.batch)
                yield batch
                if batch.over:
                    return

    def wait(self, batch_id: str) -> Batch:
        """Waits until the batch has ended."""
        for batch in self.watch(batch_id):
            last = batch
        return last

    def download(self, batch_id: str, target: str | os.PathLike[str], *, resume: bool = False) -> Path:
        """Writes the output of an ended batch to a new file and returns its path. With `resume`, continues after the
        bytes that an existing file has."""
        exchange = self._session._exchange()
        download = Download(batch_id, target, resume)
        with download:
            with closing(self._messages(download.call)) as messages:
                for message in messages:
                    exchange.do(partial(download.write, message.data), to_end=True)
        return download.path

    def _messages(self, call: Callable[[], Call]) -> Generator[Any, None, None]:
        """The messages of a stream, which is reopened if it breaks."""
        exchange = self._session._exchange()
        messages = Messages(call, self._session._calls)
        try:
            while (message := run(messages.read(), exchange)) is not None:
                yield message
        finally:
            exchange.close()
