"""Batches that the server processes in the background: `client.batches` of the two gRPC clients."""

from __future__ import annotations

import os
import stat
import uuid
from collections.abc import Callable, Iterator, Mapping
from io import FileIO
from typing import Any

from saccade._core.ranges import check_flag, check_integer, check_path, check_string, file_reason
from saccade._core.retrying import Deadline, Retries
from saccade._core.settings import CallSettings
from saccade._core.steps import Actions, Call, Open, Receive, Steps, Wait
from saccade._core.uploads import CHUNK_BYTES, chunks
from saccade.errors import FailedPrecondition, InvalidArgument, SaccadeError
from saccade.types import Batch
from saccade.v1 import batch_pb2

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
        cached_tokens=message.cached_tokens,
        reasoning_tokens=message.reasoning_tokens,
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
        metadata=dict(message.metadata),
        input_name=message.input_name,
    )


def create_steps(
    source: str | os.PathLike[str] | bytes,
    ordered: bool,
    max_errors: int | None,
    metadata: Mapping[str, str] | None,
    input_name: str,
    request_id: str,
) -> Steps[Batch]:
    """Creates a batch. The file is read while it is sent, again for each attempt."""
    header = batch_pb2.BatchHeader(
        request_id=check_string("request_id", request_id or uuid.uuid4().hex), size_bytes=_size(source),
        ordered=check_flag("ordered", ordered), metadata=_metadata(metadata or {}),
        input_name=check_string("input_name", input_name),
    )  # fmt: skip
    if max_errors is not None:
        header.max_errors = check_integer("max_errors", max_errors)

    def messages() -> Iterator[batch_pb2.CreateBatchRequest]:
        yield batch_pb2.CreateBatchRequest(header=header)
        if isinstance(source, bytes):
            yield from (batch_pb2.CreateBatchRequest(chunk=chunk) for chunk in chunks(source))
        else:
            try:
                with open(source, "rb") as file:
                    while chunk := file.read(CHUNK_BYTES):
                        yield batch_pb2.CreateBatchRequest(chunk=chunk)
            except OSError as error:  # it has been deleted since
                raise InvalidArgument(f"cannot read {os.fspath(source)!r}: {error.strerror}") from error

    return batch_from((yield Call("batch", "CreateBatch", messages)).batch)


def _metadata(given: Mapping[str, str]) -> dict[str, str]:
    if not isinstance(given, Mapping):
        raise InvalidArgument(f"metadata: expected a mapping from strings to strings, got {type(given).__name__}")
    return {
        check_string("metadata: a key", key): check_string(f"metadata[{key!r}]", value) for key, value in given.items()
    }


def _size(source: str | os.PathLike[str] | bytes) -> int:
    if isinstance(source, bytes):
        return len(source)
    if not isinstance(source, str | os.PathLike):
        raise InvalidArgument(f"source: expected a path or bytes, got {type(source).__name__}")
    check_plain_file(source)
    try:
        with open(source, "rb") as file:  # a folder, or a file without permission, has a size too
            return os.fstat(file.fileno()).st_size
    except OSError as error:
        raise InvalidArgument(f"cannot read {os.fspath(source)!r}: {error.strerror}") from error


def check_plain_file(path: str | os.PathLike[str]) -> None:
    """Raises InvalidArgument for a pipe or a device, which has no size and cannot be read a second time."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"cannot read {os.fspath(path)!r}: {file_reason(error)}") from error
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise InvalidArgument(f"cannot read {os.fspath(path)!r}: it is a pipe or a device, expected a file")


def get_steps(batch_id: str) -> Steps[Batch]:
    request = batch_pb2.GetBatchRequest(batch_id=check_string("batch_id", batch_id))
    return batch_from((yield Call("batch", "GetBatch", request)).batch)


def list_steps() -> Steps[list[Batch]]:
    found: list[Batch] = []
    token = ""
    while True:
        page = yield Call("batch", "ListBatches", batch_pb2.ListBatchesRequest(page_token=token))
        found += map(batch_from, page.batches)
        if not (token := page.next_page_token):
            return found


def cancel_steps(batch_id: str) -> Steps[Batch]:
    request = batch_pb2.CancelBatchRequest(batch_id=check_string("batch_id", batch_id))
    return batch_from((yield Call("batch", "CancelBatch", request)).batch)


def delete_steps(batch_id: str) -> Steps[None]:
    request = batch_pb2.DeleteBatchRequest(batch_id=check_string("batch_id", batch_id))
    yield Call("batch", "DeleteBatch", request, deletes=True)


class Messages:
    """The messages of a stream that is reopened if it breaks. Retries and the call's timeout start again after each
    message: a batch may take days.

    Args:
        call: makes the request of each attempt.
    """

    def __init__(self, call: Callable[[], Call], settings: CallSettings) -> None:
        self._call = call
        self._settings = settings
        self._opened = False
        self._progress()

    def _progress(self) -> None:
        self._retries = Retries(self._settings.max_retries, Deadline(self._settings.timeout))

    def read(self) -> Actions[Any]:
        """The next message; None at the end."""
        while True:
            try:
                if not self._opened:
                    yield Open(self._call(), None)
                    self._opened = True
                message = yield Receive(None)
                self._progress()
                return message
            except SaccadeError as error:
                delay = self._retries.delay_after(error)
            self._opened = False
            yield Wait(delay)


def watch_call(batch_id: str) -> Call:
    return Call("batch", "WatchBatch", batch_pb2.WatchBatchRequest(batch_id=check_string("batch_id", batch_id)))


class Download:
    """Writes the output to a file as it is received, and knows the offset to resume from. A context manager that closes
    the file; after an error it also removes a new file to which nothing has been written."""

    def __init__(self, batch_id: str, target: str | os.PathLike[str], resume: bool) -> None:
        self._batch_id = check_string("batch_id", batch_id)
        self.path = check_path("target", target)
        try:
            # Unbuffered: bytes that a full disk has rejected would be written once more when the file is closed. Not
            # for appending: two programs that download to one file write the same bytes to the same places.
            flags = os.O_CREAT | (0 if resume else os.O_EXCL)
            self.file: FileIO = open(
                self.path, "r+b", buffering=0, opener=lambda path, mode: os.open(path, mode | flags, 0o666)
            )
        except (OSError, ValueError) as error:
            hint = "; resume=True continues it" if isinstance(error, FileExistsError) else ""
            raise FailedPrecondition(f"cannot write {str(self.path)!r}: {file_reason(error)}{hint}") from error
        self.offset = self.file.seek(0, os.SEEK_END)
        self._new = not resume

    def __enter__(self) -> Download:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.file.close()
        if kind is not None and self._new and self.offset == 0:
            self.path.unlink(missing_ok=True)

    def call(self) -> Call:
        request = batch_pb2.DownloadBatchOutputRequest(batch_id=self._batch_id, offset=self.offset)
        return Call("batch", "DownloadBatchOutput", request)

    def write(self, data: bytes) -> None:
        """Appends data. Raises FailedPrecondition, on a full disk for example; the download can then be resumed."""
        rest = memoryview(data)
        try:
            while rest:
                written = self.file.write(rest)
                self.offset += written
                rest = rest[written:]
        except OSError as error:
            raise FailedPrecondition(
                f"cannot write {str(self.path)!r} after {self.offset} bytes: {error.strerror}"
            ) from error
