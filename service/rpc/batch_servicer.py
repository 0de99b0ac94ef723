"""BatchService over gRPC. Disk work runs in threads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

from saccade.v1 import batch_pb2, batch_pb2_grpc
from service.answers.convert import MAX_REQUEST_ID
from service.batches.batch_store import BatchRecord, BatchStore
from service.batches.batches import Batches
from service.common import errors
from service.media.arriving import MAX_CHUNK, header_of, receive
from service.rpc.servicer import in_thread, to_end
from service.telemetry.call_context import current_call

MAX_PAGE = 100
MAX_METADATA, MAX_KEY, MAX_VALUE, MAX_NAME = 16, 64, 512, 256
_STATES = {
    "validating": batch_pb2.BATCH_STATE_VALIDATING,
    "running": batch_pb2.BATCH_STATE_RUNNING,
    "completed": batch_pb2.BATCH_STATE_COMPLETED,
    "failed": batch_pb2.BATCH_STATE_FAILED,
    "cancelled": batch_pb2.BATCH_STATE_CANCELLED,
}


def _tenant() -> str:
    return current_call().tenant.name


class BatchServicer(batch_pb2_grpc.BatchServiceServicer):
    def __init__(self, batches: Batches) -> None:
        self._batches, self._store = batches, batches.store

    async def CreateBatch(
        self, requests: AsyncIterator[batch_pb2.CreateBatchRequest], context: Any
    ) -> batch_pb2.CreateBatchResponse:
        self._batches.check_open()
        header = await header_of(requests, "a batch")
        max_errors = header.max_errors if header.HasField("max_errors") else None
        if max_errors is not None and max_errors < 0:
            raise errors.InvalidArgument(
                f"max_errors is {max_errors}; it cannot be negative", field="header.max_errors"
            )
        _check_labels(header)
        async with in_thread(self._store.upload(_tenant(), header.size_bytes, header.request_id)) as upload:
            current_call().announce(header.size_bytes)
            await receive(requests, upload.write)
            self._batches.check_open()
            committing = asyncio.to_thread(
                upload.commit, header.request_id, ordered=header.ordered, max_errors=max_errors,
                metadata=dict(header.metadata), input_name=header.input_name,
            )  # fmt: skip
            try:
                record = await to_end(asyncio.ensure_future(committing))
            finally:  # the batch exists even if its creator no longer waits for the answer
                self._batches.created()
        return batch_pb2.CreateBatchResponse(batch=self._proto(record))

    async def GetBatch(self, request: batch_pb2.GetBatchRequest, context: Any) -> batch_pb2.GetBatchResponse:
        return batch_pb2.GetBatchResponse(batch=self._proto(self._store.get(_tenant(), request.batch_id)))

    async def ListBatches(self, request: batch_pb2.ListBatchesRequest, context: Any) -> batch_pb2.ListBatchesResponse:
        if request.page_size < 0:
            raise errors.InvalidArgument(f"page_size is {request.page_size}; it cannot be negative", field="page_size")
        records, token = self._store.page(_tenant(), min(request.page_size or MAX_PAGE, MAX_PAGE), request.page_token)
        return batch_pb2.ListBatchesResponse(batches=map(self._proto, records), next_page_token=token)

    async def CancelBatch(self, request: batch_pb2.CancelBatchRequest, context: Any) -> batch_pb2.CancelBatchResponse:
        record = await self._batches.cancel(_tenant(), request.batch_id)
        return batch_pb2.CancelBatchResponse(batch=self._proto(record))

    async def DeleteBatch(self, request: batch_pb2.DeleteBatchRequest, context: Any) -> batch_pb2.DeleteBatchResponse:
        await self._batches.delete(_tenant(), request.batch_id)
        return batch_pb2.DeleteBatchResponse()

    async def WatchBatch(
        self, request: batch_pb2.WatchBatchRequest, context: Any
    ) -> AsyncGenerator[batch_pb2.WatchBatchResponse, None]:
        async for record in self._batches.watch(_tenant(), request.batch_id):
            yield batch_pb2.WatchBatchResponse(batch=self._proto(record))

    async def DownloadBatchOutput(
        self, request: batch_pb2.DownloadBatchOutputRequest, context: Any
    ) -> AsyncGenerator[batch_pb2.DownloadBatchOutputResponse, None]:
        record = self._store.get(_tenant(), request.batch_id)
        if not record.over:
            raise errors.FailedPrecondition(
                f"batch {record.batch_id} is {record.state}; its output is available when it has ended",
                reason="BATCH_RUNNING",
            )
        if not 0 <= request.offset <= record.output_bytes:
            raise errors.OutOfRange(
                f"offset is {request.offset}; it must be from 0 to {record.output_bytes}, the size of the output",
                field="offset",
                metadata={"size": str(record.output_bytes)},
            )  # fmt: skip
        path, offset = self._store.folder(record.batch_id) / "output.jsonl", request.offset
        while offset < record.output_bytes:
            data = await asyncio.to_thread(_read, path, offset)
            if not data:
                raise errors.NotFound(f"batch {record.batch_id} has been deleted", reason="BATCH_NOT_FOUND")
            offset += len(data)
            yield batch_pb2.DownloadBatchOutputResponse(data=data)

    def _proto(self, record: BatchRecord) -> batch_pb2.Batch:
        return batch_to_proto(record, self._store)


def _check_labels(header: batch_pb2.BatchHeader) -> None:
    """Raises InvalidArgument if the caller's metadata, name of the file or request id is too long."""
    if len(header.metadata) > MAX_METADATA:
        raise errors.InvalidArgument(
            f"metadata has {len(header.metadata)} pairs; at most {MAX_METADATA} are allowed", field="header.metadata"
        )
    lengths = [
        ("metadata: a key", MAX_KEY, header.metadata), ("metadata: a value", MAX_VALUE, header.metadata.values()),
        ("input_name", MAX_NAME, [header.input_name]), ("request_id", MAX_REQUEST_ID, [header.request_id]),
    ]  # fmt: skip
    for name, most, texts in lengths:
        if (longest := max(map(len, texts), default=0)) > most:
            field = f"header.{name.partition(':')[0]}"
            raise errors.InvalidArgument(f"{name} has {longest} characters; at most {most} are allowed", field=field)


def _read(path: Path, offset: int) -> bytes:
    """A chunk of the file; empty if the file is gone."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(MAX_CHUNK)
    except FileNotFoundError:
        return b""


def batch_to_proto(record: BatchRecord, store: BatchStore) -> batch_pb2.Batch:
    waiting = record.state == "validating" and not record.started
    batch = batch_pb2.Batch(
        batch_id=record.batch_id, state=batch_pb2.BATCH_STATE_QUEUED if waiting else _STATES[record.state],
        total=record.total, completed=record.completed, failed=record.failed, prompt_tokens=record.prompt_tokens,
        completion_tokens=record.completion_tokens, cached_tokens=record.cached_tokens,
        reasoning_tokens=record.reasoning_tokens, reason=record.reason, message=record.message,
        problems=record.problems, model=record.model, model_version=record.version,
        output_bytes=record.output_bytes if record.over else 0, metadata=record.metadata, input_name=record.input_name,
    )  # fmt: skip
    times = {
        "create_time": record.created, "start_time": record.started, "end_time": record.ended,
        "expire_time": store.expires(record),
    }  # fmt: skip
    for name, seconds in times.items():
        if seconds:
            getattr(batch, name).FromMilliseconds(round(seconds * 1000))
    return batch
