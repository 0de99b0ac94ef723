"""Batches that the server works on by itself: `client.batches` of the two gRPC clients."""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from saccade._core.retrying import Deadline, Retries
from saccade._core.settings import CallSettings
from saccade._core.steps import Call, Steps
from saccade._core.uploads import CHUNK_BYTES, chunks
from saccade.errors import FailedPrecondition, InvalidArgument, SaccadeError
from saccade.types import Batch
from saccade.v1 import batch_pb2

if TYPE_CHECKING:
    from saccade.aio import AsyncClient
    from saccade.client import SyncClient

_STATES = {
    batch_pb2.BATCH_STATE_VALIDATING: "validating",
    batch_pb2.BATCH_STATE_QUEUED: "queued",
    batch_pb2.BATCH_STATE_RUNNING: "running",
    batch_pb2.BATCH_STATE_COMPLETED: "completed",
    batch_pb2.BATCH_STATE_FAILED: "failed",
    batch_pb2.BATCH_STATE_CANCELLED: "cancelled",
}


def batch_from(message: batch_pb2.Batch) -> Batch:
    def seconds(name: str) -> float | None:
        return getattr(message, name).ToMilliseconds() / 1000 if message.HasField(name) else None

    return Batch(
        batch_id=message.batch_id,
        state=_STATES.get(message.state, ""),
        total=message.total,
        completed=message.completed,
        failed=message.failed,
        prompt_tokens=message.prompt_tokens,
        completion_tokens=message.completion_tokens,
        created=seconds("create_time"),
        started=seconds("start_time"),
        ended=seconds("end_time"),
        expires=seconds("expire_time"),
        reason=message.reason,
        message=message.message,
        problems=tuple(message.problems),
        model=message.model,
        model_version=message.model_version,
        output_bytes=message.output_bytes,
    )


def create_steps(
    source: str | os.PathLike[str] | bytes, ordered: bool, max_errors: int | None, request_id: str
) -> Steps[Batch]:
    """The file is read as it is sent, and anew in each attempt."""
    header = batch_pb2.BatchHeader(
        request_id=request_id or uuid.uuid4().hex, size_bytes=_size(source), ordered=ordered, max_errors=max_errors
    )

    def messages() -> Iterator[batch_pb2.CreateBatchRequest]:
        yield batch_pb2.CreateBatchRequest(header=header)
        if isinstance(source, bytes):
            yield from (batch_pb2.CreateBatchRequest(chunk=chunk) for chunk in chunks(source))
        else:
            with open(source, "rb") as file:
                while chunk := file.read(CHUNK_BYTES):
                    yield batch_pb2.CreateBatchRequest(chunk=chunk)

    return batch_from((yield Call("batch", "CreateBatch", messages)).batch)


def _size(source: str | os.PathLike[str] | bytes) -> int:
    if isinstance(source, bytes):
        return len(source)
    try:
        return os.stat(source).st_size
    except OSError as error:
        raise InvalidArgument(f"cannot read {os.fspath(source)!r}: {error.strerror}") from error


def get_steps(batch_id: str) -> Steps[Batch]:
    return batch_from((yield Call("batch", "GetBatch", batch_pb2.GetBatchRequest(batch_id=batch_id))).batch)


def list_steps() -> Steps[list[Batch]]:
    found: list[Batch] = []
    token = ""
    while True:
        page = yield Call("batch", "ListBatches", batch_pb2.ListBatchesRequest(page_token=token))
        found += map(batch_from, page.batches)
        if not (token := page.next_page_token):
            return found


def cancel_steps(batch_id: str) -> Steps[Batch]:
    return batch_from((yield Call("batch", "CancelBatch", batch_pb2.CancelBatchRequest(batch_id=batch_id))).batch)


def delete_steps(batch_id: str) -> Steps[None]:
    yield Call("batch", "DeleteBatch", batch_pb2.DeleteBatchRequest(batch_id=batch_id))


class _Again:
    """When a stream that broke off is opened anew. Retries and the call's time count anew after each message: a batch
    may take days."""

    def __init__(self, calls: CallSettings) -> None:
        self._calls = calls
        self.progress()

    def progress(self) -> None:
        self._retries = Retries(self._calls.max_retries, Deadline(self._calls.timeout))

    def delay(self, error: SaccadeError) -> float:
        """Seconds to wait. Raises the error where it has failed for good."""
        return self._retries.delay_after(error)


class _Download:
    """The output as it arrives in a file, and where to go on."""

    def __init__(self, batch_id: str, target: str | os.PathLike[str], resume: bool) -> None:
        self._batch_id = batch_id
        self.path = Path(target)
        try:
            self.file: BinaryIO = open(self.path, "ab" if resume else "xb")
        except OSError as error:
            hint = "; resume=True goes on behind what is there" if isinstance(error, FileExistsError) else ""
            raise FailedPrecondition(f"cannot write {str(self.path)!r}: {error.strerror}{hint}") from error
        self.offset = self.file.seek(0, os.SEEK_END)

    def request(self) -> batch_pb2.DownloadBatchOutputRequest:
        return batch_pb2.DownloadBatchOutputRequest(batch_id=self._batch_id, offset=self.offset)

    def write(self, data: bytes) -> None:
        self.file.write(data)
        self.offset += len(data)


class SyncBatches:
    """`client.batches`: files of requests in OpenAI's batch format that the server answers while nobody waits.

    Pictures are data URLs or `media:ID`s of `client.media`. A batch survives a restart of the server, and runs behind
    all live calls.
    """

    def __init__(self, client: SyncClient) -> None:
        self._client = client

    def create(
        self,
        source: str | os.PathLike[str] | bytes,
        *,
        ordered: bool = False,
        max_errors: int | None = None,
        request_id: str = "",
        timeout: float | None = None,
    ) -> Batch:
        """Hands a file over, a path or its content.

        Args:
            ordered: answers in the order of the requests.
            max_errors: the batch fails after more error rows than this.
            request_id: a second call with the same one gives the batch that the first has made.
        """
        return self._client._steps(create_steps(source, ordered, max_errors, request_id), timeout)

    def get(self, batch_id: str, *, timeout: float | None = None) -> Batch:
        """Raises NotFound."""
        return self._client._steps(get_steps(batch_id), timeout)

    def list(self, *, timeout: float | None = None) -> list[Batch]:
        """All of them, the newest first."""
        return self._client._steps(list_steps(), timeout)

    def cancel(self, batch_id: str, *, timeout: float | None = None) -> Batch:
        """Ends it; what has been answered can still be downloaded."""
        return self._client._steps(cancel_steps(batch_id), timeout)

    def delete(self, batch_id: str, *, timeout: float | None = None) -> None:
        """Raises FailedPrecondition for one that is not over."""
        self._client._steps(delete_steps(batch_id), timeout)

    def watch(self, batch_id: str) -> Generator[Batch, None, None]:
        """The batch now and after each change, until it is over. Goes on over restarts of the server."""
        for message in self._streamed(lambda: ("WatchBatch", batch_pb2.WatchBatchRequest(batch_id=batch_id))):
            batch = batch_from(message.batch)
            yield batch
            if batch.over:
                return

    def wait(self, batch_id: str) -> Batch:
        """The batch once it is over."""
        *_, last = self.watch(batch_id)
        return last

    def download(self, batch_id: str, target: str | os.PathLike[str], *, resume: bool = False) -> Path:
        """Writes the output of a batch that is over to a new file; with `resume`, behind what the file holds."""
        download = _Download(batch_id, target, resume)
        with download.file:
            for message in self._streamed(lambda: ("DownloadBatchOutput", download.request())):
                download.write(message.data)
        return download.path

    def _streamed(self, request: Callable[[], tuple[str, Any]]) -> Iterator[Any]:
        """The messages of a stream that is opened anew where it breaks off, with the `request` of that moment."""
        import time

        again = _Again(self._client._call_settings)
        while True:
            responses = self._client._server_stream("batch", *request())
            try:
                while (message := responses.receive(None)) is not None:
                    again.progress()
                    yield message
                return
            except SaccadeError as error:
                delay = again.delay(error)
            finally:
                responses.close()
            time.sleep(delay)


class AsyncBatches:
    """`client.batches` of the asyncio client; see `SyncBatches`."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def create(
        self,
        source: str | os.PathLike[str] | bytes,
        *,
        ordered: bool = False,
        max_errors: int | None = None,
        request_id: str = "",
        timeout: float | None = None,
    ) -> Batch:
        """Hands a file over; see `SyncBatches.create`."""
        return await self._client._steps(create_steps(source, ordered, max_errors, request_id), timeout)

    async def get(self, batch_id: str, *, timeout: float | None = None) -> Batch:
        """Raises NotFound."""
        return await self._client._steps(get_steps(batch_id), timeout)

    async def list(self, *, timeout: float | None = None) -> list[Batch]:
        """All of them, the newest first."""
        return await self._client._steps(list_steps(), timeout)

    async def cancel(self, batch_id: str, *, timeout: float | None = None) -> Batch:
        """Ends it; what has been answered can still be downloaded."""
        return await self._client._steps(cancel_steps(batch_id), timeout)

    async def delete(self, batch_id: str, *, timeout: float | None = None) -> None:
        """Raises FailedPrecondition for one that is not over."""
        await self._client._steps(delete_steps(batch_id), timeout)

    async def watch(self, batch_id: str) -> AsyncGenerator[Batch, None]:
        """The batch now and after each change, until it is over. Goes on over restarts of the server."""
        async for message in self._streamed(lambda: ("WatchBatch", batch_pb2.WatchBatchRequest(batch_id=batch_id))):
            batch = batch_from(message.batch)
            yield batch
            if batch.over:
                return

    async def wait(self, batch_id: str) -> Batch:
        """The batch once it is over."""
        batches = [batch async for batch in self.watch(batch_id)]
        return batches[-1]

    async def download(self, batch_id: str, target: str | os.PathLike[str], *, resume: bool = False) -> Path:
        """Writes the output of a batch that is over; see `SyncBatches.download`."""
        download = _Download(batch_id, target, resume)
        with download.file:
            async for message in self._streamed(lambda: ("DownloadBatchOutput", download.request())):
                await self._client._beside(download.write, message.data)
        return download.path

    async def _streamed(self, request: Callable[[], tuple[str, Any]]) -> AsyncGenerator[Any, None]:
        import asyncio

        again = _Again(self._client._settings.calls)
        while True:
            try:
                async for message in self._client._server_stream("batch", *request()):
                    again.progress()
                    yield message
                return
            except SaccadeError as error:
                delay = again.delay(error)
            await asyncio.sleep(delay)
