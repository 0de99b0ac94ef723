"""`/v1/batches`, implemented with the gRPC servers' BatchService."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import IO, Any, Literal

from pydantic import Field

from saccade._core.batches import batch_from
from saccade._openai.fields import BATCH
from saccade._openai.problems import validated
from saccade._openai.schema import Strict
from saccade.errors import NotFound, SaccadeError, Unimplemented
from saccade.types import Batch
from saccade.v1 import batch_pb2
from service.http.call import HttpCall, path_values
from service.http.file_store import owner_of
from service.http.pages import index_of, limit_of, page_object, query_of
from service.http.upstream import Connection

URL = "/v1/chat/completions"
MESSAGES = "/v1/messages/batches"
"""The name of the input of a batch that was created there; `/v1/batches` does not show it."""
CHUNK = 2**20
DEFAULT_LISTED, MAX_LISTED = 20, 100
"""Number of batches on one page of the list: without the parameter `limit`, and at most."""
_STATES = {"queued": "validating", "validating": "validating", "running": "in_progress"}


class BatchRequest(Strict):
    """The body of `/v1/batches`."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions"]
    completion_window: str = Field("24h", description="Ignored: a batch runs until it is complete.")
    metadata: dict[str, str] | None = None
    output_expires_after: None = None


async def create(call: HttpCall) -> None:
    """Starts a batch from an uploaded file."""
    call.fields = BATCH
    body = validated(BatchRequest, await call.json())
    stored = call.front.files.get(body.input_file_id, owner_of(call.headers))
    header = batch_pb2.BatchHeader(
        request_id=call.request_id, size_bytes=stored.size, metadata=body.metadata, input_name=body.input_file_id
    )

    try:
        file = open(stored.path, "rb")  # before it is sent, because it may be deleted meanwhile
    except FileNotFoundError:
        raise NotFound(f"there is no file {stored.file_id!r}", reason="FILE_NOT_FOUND") from None

    with file:
        made = await call.caller().create("batch", "CreateBatch", lambda: parts(header, file), call.request_id)
    await call.respond(_object(batch_from(made.batch)))


def parts(header: batch_pb2.BatchHeader, file: IO[bytes]) -> Iterator[batch_pb2.CreateBatchRequest]:
    """The messages of one attempt. They do not use the open file's position: a thread may still be reading for an
    attempt that has failed when the next one begins."""
    yield batch_pb2.CreateBatchRequest(header=header)
    offset = 0
    while chunk := os.pread(file.fileno(), CHUNK, offset):
        yield batch_pb2.CreateBatchRequest(chunk=chunk)
        offset += len(chunk)


async def get(call: HttpCall) -> None:
    """The state of a batch."""
    batch, _ = await find_batch(call, path_values(call.scope)["batch_id"])
    await call.respond(_object(batch))


async def cancel(call: HttpCall) -> None:
    """Cancels a batch; finished answers are kept."""
    batch, connection = await find_batch(call, path_values(call.scope)["batch_id"])
    await call.respond(_object(await cancelled(call, batch, connection)))


async def cancelled(call: HttpCall, batch: Batch, connection: Connection) -> Batch:
    """Cancels a batch and returns it when it has ended."""
    request = batch_pb2.CancelBatchRequest(batch_id=batch.batch_id)
    return batch_from((await call.caller().call("batch", "CancelBatch", request, on=connection)).batch)


async def list_batches(call: HttpCall) -> None:
    """Lists batches, newest first: at most `limit`, those after the id `after`."""
    query = query_of(call)
    limit = limit_of(query, DEFAULT_LISTED, MAX_LISTED)
    found = await all_batches(call, lambda batch: batch.input_name != MESSAGES)
    if "after" in query:
        ids = [batch.batch_id for batch in found]
        found = found[index_of(query, "after", ids, "batch", "BATCH_NOT_FOUND") + 1 :]
    page = page_object([_object(batch) for batch in found[:limit]], more=len(found) > limit)
    await call.respond({"object": "list", **page})


async def all_batches(call: HttpCall, chosen: Callable[[Batch], bool]) -> list[Batch]:
    """The chosen batches of all servers that have a BatchService and answer, newest first; a header of the answer names
    those that do not. Raises SaccadeError if there is none."""
    caller = call.caller()

    async def of(connection: Connection) -> list[Batch]:
        found: list[Batch] = []
        token = ""
        while True:
            request = batch_pb2.ListBatchesRequest(page_token=token)
            page = await caller.call("batch", "ListBatches", request, on=connection)
            found += map(batch_from, page.batches)
            if not (token := page.next_page_token):
                return found

    try:
        found, failures = await caller.of_each(of)
    except SaccadeError as error:
        raise _explained(error) from None
    call.note_missing(name for name, error in failures.items() if not isinstance(error, Unimplemented))
    listed = [batch for batches in found for batch in batches if chosen(batch)]
    return sorted(listed, key=lambda batch: -(batch.created or 0))


async def check_access(call: HttpCall) -> None:
    """Raises SaccadeError if the key may not use batches, or if the server has no BatchService."""
    caller, request = call.caller(), batch_pb2.ListBatchesRequest(page_size=1)
    try:
        await caller.of_any(lambda connection: caller.call("batch", "ListBatches", request, on=connection))
    except SaccadeError as error:
        raise _explained(error) from None


def _explained(error: SaccadeError) -> SaccadeError:
    """An error of ListBatches; one of a server without BatchService says what it needs for it."""
    if isinstance(error, Unimplemented):
        return Unimplemented("batches need a server with one frontend process", reason="UNIMPLEMENTED")
    return error


async def find_batch(call: HttpCall, batch_id: str, *, messages: bool = False) -> tuple[Batch, Connection]:
    """The batch, and the server that has it. `messages`: it is one of `/v1/messages/batches`. Raises NotFound, or the
    error of a server that did not answer."""
    caller = call.caller()
    request = batch_pb2.GetBatchRequest(batch_id=batch_id)

    async def ask(connection: Connection) -> tuple[Batch, Connection]:
        answer = await caller.call("batch", "GetBatch", request, on=connection)
        return batch_from(answer.batch), connection

    unknown = NotFound(f"there is no batch {batch_id[:100]!r}", reason="BATCH_NOT_FOUND")
    try:
        batch, connection = await caller.of_any(ask)
    except NotFound:
        raise unknown from None
    if (batch.input_name == MESSAGES) != messages:
        raise unknown
    return batch, connection


async def delete_batch(call: HttpCall, batch: Batch, connection: Connection) -> None:
    """Deletes a batch that has ended, with its output."""
    request = batch_pb2.DeleteBatchRequest(batch_id=batch.batch_id)
    await call.caller().call("batch", "DeleteBatch", request, on=connection)


async def all_output(
    call: HttpCall, batch: Batch, connection: Connection, offset: int = 0
) -> AsyncGenerator[bytes, None]:
    """What the batch has written, answers and errors, from the byte `offset` on."""
    request = batch_pb2.DownloadBatchOutputRequest(batch_id=batch.batch_id, offset=offset)
    timeout = call.timeout() if "x-request-timeout" in call.headers else None
    messages = call.caller().messages("batch", "DownloadBatchOutput", request, on=connection, timeout=timeout)
    async with contextlib.aclosing(messages) as source:
        async for message in source:
            yield message.data


async def output_lines(call: HttpCall, batch: Batch, connection: Connection) -> AsyncGenerator[list[bytes], None]:
    """The same as whole lines, some at a time, without their ends."""
    rest = b""
    async with contextlib.aclosing(all_output(call, batch, connection)) as source:
        async for piece in source:
            *lines, rest = (rest + piece).split(b"\n")
            yield lines


def _object(batch: Batch) -> dict[str, Any]:
    """OpenAI's object for a batch."""
    state = _STATES.get(batch.state, batch.state)
    failures = [
        {"code": batch.reason or "BATCH_FAILED", "message": text, "line": _line(text), "param": None}
        for text in batch.problems or ((batch.message,) if batch.state == "failed" else ())
    ]

    # A server of an earlier release has not counted the rows of a batch that was cancelled soon after a restart.
    answered = batch.output_bytes and (batch.completed or not batch.failed)

    def ended(name: str) -> int | None:
        return _seconds(batch.ended) if batch.state == name else None

    return {
        "id": batch.batch_id,
        "object": "batch",
        "endpoint": URL,
        "model": batch.model or None,
        "errors": {"object": "list", "data": failures} if failures else None,
        "input_file_id": batch.input_name,
        "completion_window": "24h",
        "status": state,
        "output_file_id": f"file-output-{batch.batch_id}" if batch.over and answered else None,
        "error_file_id": f"file-errors-{batch.batch_id}" if batch.over and batch.failed else None,
        "created_at": _seconds(batch.created) or int(time.time()),
        "in_progress_at": _seconds(batch.started),
        "expires_at": _seconds(batch.expires),
        "finalizing_at": None,
        "completed_at": ended("completed"),
        "failed_at": ended("failed"),
        "expired_at": None,
        "cancelling_at": None,
        "cancelled_at": ended("cancelled"),
        "request_counts": {
            "total": batch.total, "completed": batch.completed, "failed": batch.failed,
        },
        "usage": {
            "input_tokens": batch.prompt_tokens, "output_tokens": batch.completion_tokens,
            "total_tokens": batch.prompt_tokens + batch.completion_tokens,
            "input_tokens_details": {"cached_tokens": batch.cached_tokens},
            "output_tokens_details": {"reasoning_tokens": batch.reasoning_tokens},
        },
        "metadata": batch.metadata or None,
    }  # fmt: skip


def _seconds(value: float | None) -> int | None:
    return None if value is None else int(value)


def _line(problem: str) -> int | None:
    """The line number in a problem of an input file, which begins as `line 3: ...`."""
    word = problem.removeprefix("line ").partition(":")[0]
    return int(word) if problem.startswith("line ") and word.isdigit() else None
