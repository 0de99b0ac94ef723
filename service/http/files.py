"""`/v1/files`: input files of batches, and their output."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request

from saccade.errors import DeadlineExceeded, InvalidArgument, MessageTooLarge, NotFound, RateLimited
from saccade.types import Batch
from service.http.batches import all_output, check_access, delete_batch, find_batch, output_lines
from service.http.call import ClientGone, HttpCall, path_values
from service.http.file_store import StoredFile, owner_of, stored_file
from service.http.pages import index_of, limit_of, page_object, query_of
from service.http.ranges import Unsatisfiable, cut, parse_range, range_wanted
from service.http.upstream import Connection
from service.media.arriving import FULL

log = logging.getLogger(__name__)

OUTPUT, ERRORS = "file-output-", "file-errors-"
"""Prefixes of the ids of a batch's files; the batch's id follows."""
FORM = {"file", "purpose"}
"""Fields of the form of an upload."""
MAX_LISTED = 10_000
"""Largest number of files on one page of the list."""


async def upload(call: HttpCall) -> None:
    """Stores a file for `/v1/batches`."""
    call.check_content_type("multipart/form-data")
    await check_access(call)
    store, owner = call.front.files, owner_of(call.headers)
    limited = _LimitedBody(call, owner)
    try:
        async with Request(call.scope, limited.receive).form(max_files=1, max_fields=8) as form:
            if unknown := sorted(form.keys() - FORM):
                raise InvalidArgument(f"{unknown[0][:60]}: unknown field; the form has {' and '.join(sorted(FORM))}")
            file, purpose = form.get("file"), form.get("purpose")
            if not isinstance(file, UploadFile):
                raise InvalidArgument("file: expected a file in the form")
            if purpose != "batch":
                raise InvalidArgument(f"purpose: expected batch, got {str(purpose)[:60]!r}")
            path, size = store.new_path(), file.size or 0
            limited.pass_on(size)
            stored = stored_file(path, owner, (file.filename or "batch.jsonl")[:255], size)
            try:
                await asyncio.to_thread(_keep, file, stored)
            except BaseException:
                store.release(owner, size)
                stored.remove()
                raise
            store.add(stored)
    except OSError as error:
        if error.errno not in FULL:
            raise
        log.error("uploaded files: %s", error.strerror)
        raise RateLimited("the disk of uploaded files is full", reason="QUOTA_EXCEEDED") from None
    except HTTPException as error:  # from Starlette's parser: not a form
        raise InvalidArgument(f"the form cannot be read: {error.detail}") from None
    except UnicodeError as error:  # from Starlette's parser, for the form's charset
        raise InvalidArgument(f"the form cannot be read: {error}") from None
    finally:
        limited.release()
    await call.respond(_uploaded(stored))


def _keep(file: UploadFile, stored: StoredFile) -> None:
    with open(stored.path, "xb") as target:
        while chunk := file.file.read(2**20):
            target.write(chunk)
        target.flush()
        os.fsync(target.fileno())
    stored.describe()


class _LimitedBody:
    """The body of a form, limited in size and in the time between two pieces. Its bytes are reserved in the store while
    they are parsed, because the parser writes them to a temporary file."""

    def __init__(self, call: HttpCall, owner: bytes) -> None:
        self._call, self._owner, self._size = call, owner, 0

    async def receive(self) -> Any:
        timeout = self._call.front.options.stall_timeout
        try:
            async with asyncio.timeout(timeout):
                message = await self._call.receive()
        except TimeoutError:
            raise DeadlineExceeded(f"no piece of the file arrived for {timeout:g} s", reason="SLOW_WRITER") from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        size = len(message.get("body", b""))
        store = self._call.front.files
        if self._size + size > store.key_capacity:
            raise MessageTooLarge(f"the file has more than {store.key_capacity} bytes", reason="MESSAGE_TOO_LARGE")
        store.reserve(self._owner, size)
        self._size += size
        return message

    def pass_on(self, size: int) -> None:
        """Keeps `size` of the reserved bytes for the file itself, which the caller then releases. Reserved anew, a
        file could take at most half of the store."""
        self._size -= size

    def release(self) -> None:
        self._call.front.files.release(self._owner, self._size)


def _file(file_id: str, name: str, size: int, created: float, expires: float | None, purpose: str) -> dict[str, Any]:
    return {
        "id": file_id, "object": "file", "bytes": size, "created_at": int(created), "filename": name,
        "purpose": purpose, "status": "processed", "expires_at": None if expires is None else int(expires),
    }  # fmt: skip


def _uploaded(stored: StoredFile) -> dict[str, Any]:
    return _file(stored.file_id, stored.name, stored.size, stored.created, stored.expires, "batch")


async def list_files(call: HttpCall) -> None:
    """Lists the files of this key: at most `limit`, those after the id `after`, by `order` and `purpose`."""
    query = query_of(call)
    limit, order = limit_of(query, MAX_LISTED, MAX_LISTED), query.get("order", ["desc"])[0]
    if order not in ("asc", "desc"):
        raise InvalidArgument(f"order: expected asc or desc, got {order[:40]!r}")
    await check_access(call)
    found = call.front.files.owned(owner_of(call.headers))
    if order == "asc":
        found.reverse()
    if "after" in query:
        ids = [stored.file_id for stored in found]
        found = found[index_of(query, "after", ids, "file", "FILE_NOT_FOUND") + 1 :]
    if query.get("purpose", ["batch"])[0] != "batch":
        found = []
    page = page_object([_uploaded(stored) for stored in found[:limit]], more=len(found) > limit)
    await call.respond({"object": "list", **page})


async def get_file(call: HttpCall) -> None:
    """The description of a file."""
    found = await _find(call)
    if isinstance(found, StoredFile):
        await call.respond(_uploaded(found))
        return
    batch, connection = found
    size = await _counted_size(call, batch, connection)
    name = f"{batch.batch_id}_{'errors' if _of_errors(call) else 'output'}.jsonl"
    file_id = path_values(call.scope)["file_id"]
    await call.respond(_file(file_id, name, size, batch.ended or 0, batch.expires, "batch_output"))


async def delete_file(call: HttpCall) -> None:
    """Deletes an uploaded file; for the output of a batch, deletes the batch. The error file of a batch with
    answers cannot be deleted alone: the answers, which the caller may still need, would be deleted too."""
    file_id = path_values(call.scope)["file_id"]
    found = await _find(call)
    if isinstance(found, StoredFile):
        call.front.files.delete(found)
    else:
        batch, connection = found
        if _of_errors(call) and batch.completed:
            raise InvalidArgument(
                f"{file_id}: the error file is deleted together with the answers of {batch.batch_id}; to delete both, "
                f"delete file-output-{batch.batch_id}"
            )
        await delete_batch(call, batch, connection)
    await call.respond({"id": file_id, "object": "file", "deleted": True})


async def content(call: HttpCall) -> None:
    """The bytes of a file, or those of one `range`; for an output of a batch, its answers or its failed rows."""
    found = await _find(call)
    etag = f'"{path_values(call.scope)["file_id"]}"'  # a file never changes
    status, headers = 200, [("accept-ranges", "bytes"), ("etag", etag)]
    length: int | None
    wanted = range_wanted(call.scope["method"], call.headers, etag)
    if wanted is not None:
        size = found.size if isinstance(found, StoredFile) else await _counted_size(call, *found)
        try:
            part = parse_range(wanted, size)
        except Unsatisfiable:
            call.notes.append(("content-range", f"bytes */{size}"))
            raise
        status, length = 206, len(part)
        pieces = _part(call, found, part)
        headers.append(("content-range", f"bytes {part.start}-{part.stop - 1}/{size}"))
    elif isinstance(found, StoredFile):
        pieces, length = _read(found.path), found.size
    else:
        pieces, length = _output(call, *found), _output_size(call, found[0])
    if length is not None:
        headers.append(("content-length", str(length)))
    async with call.connected():
        async with contextlib.aclosing(pieces) as source:
            async for piece in source:
                if not call.started:
                    await call.start(status, "application/jsonl", headers)
                await call.write(piece)
        if not call.started:
            await call.start(status, "application/jsonl", headers)
        await call.end()


def _part(call: HttpCall, found: StoredFile | tuple[Batch, Connection], part: range) -> AsyncGenerator[bytes, None]:
    """Bytes of a file. Those before them are read, too, only if they have to be counted."""
    if isinstance(found, StoredFile):
        return cut(_read(found.path, part.start), 0, len(part))
    if _output_size(call, found[0]) is None:
        return cut(_output(call, *found), part.start, len(part))
    return cut(all_output(call, *found, part.start), 0, len(part))


async def _counted_size(call: HttpCall, batch: Batch, connection: Connection) -> int:
    """Bytes of the batch's file that the call names."""
    size = _output_size(call, batch)
    if size is None:
        size = 0
        async with call.connected(), contextlib.aclosing(_output(call, batch, connection)) as pieces:
            async for piece in pieces:
                size += len(piece)
    return size


async def _read(path: Path, first: int = 0) -> AsyncGenerator[bytes, None]:
    with open(path, "rb") as file:
        file.seek(first)
        while chunk := await asyncio.to_thread(file.read, 2**20):
            yield chunk


def _of_errors(call: HttpCall) -> bool:
    """Whether the call names a batch's errors, and not its answers."""
    return path_values(call.scope)["file_id"].startswith(ERRORS)


def _output_size(call: HttpCall, batch: Batch) -> int | None:
    """Bytes of the batch's file that the call names. None: they have to be counted, because the server writes answers
    and errors to one file."""
    if batch.state != "completed" or batch.failed:
        return None
    return 0 if _of_errors(call) else batch.output_bytes


async def _output(call: HttpCall, batch: Batch, connection: Connection) -> AsyncGenerator[bytes, None]:
    """The content of the batch's file that the call names: its answers or its errors, in whole lines. It takes as long
    as its reader, unless the call has a deadline of its own."""
    failed = _of_errors(call)
    async with contextlib.aclosing(output_lines(call, batch, connection)) as source:
        async for lines in source:
            if chosen := [line + b"\n" for line in lines if (json.loads(line)["error"] is not None) == failed]:
                yield b"".join(chosen)


async def _find(call: HttpCall) -> StoredFile | tuple[Batch, Connection]:
    """The uploaded file, or the batch whose output it is. Raises NotFound."""
    file_id = path_values(call.scope)["file_id"]
    for prefix in (OUTPUT, ERRORS):
        if file_id.startswith(prefix):
            batch, connection = await find_batch(call, file_id.removeprefix(prefix))
            if not batch.over:
                raise NotFound(f"the batch {batch.batch_id} is {batch.state}: it has no output yet")
            return batch, connection
    await check_access(call)
    return call.front.files.get(file_id, owner_of(call.headers))
