"""Receives a file that a client sends in chunks after announcing its size, and handles full disks."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from service.common import errors

log = logging.getLogger(__name__)

MAX_CHUNK = 2**20
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextlib.contextmanager
def disk_trouble(what: str, full: Callable[[str], errors.StatusError]) -> Iterator[None]:
    """Logs disk errors of the body. If the disk is full, raises `full(message)` instead; clients learn nothing else
    about the disk. `what`: the files on the disk, for messages."""
    try:
        yield
    except OSError as error:
        log.error("%s: %s", what, error.strerror)
        if error.errno in FULL:
            raise full(f"the disk of {what} is full") from error
        raise


class ArrivingFile:
    """Writes a file of `size` bytes to `path`, which must not exist; None: the file is only hashed. `disk`: a context
    that converts disk errors, such as `disk_trouble`."""

    def __init__(self, path: Path | None, size: int, disk: Callable[[], AbstractContextManager[None]]) -> None:
        self.size = size
        self.hash = hashlib.sha256()
        self._disk = disk
        self._written = 0
        with disk():
            self._file = path.open("xb") if path is not None else None

    def write(self, chunk: bytes) -> None:
        """Writes a chunk. Raises InvalidArgument beyond the announced size, and the error of `disk` on a full disk."""
        if len(chunk) > MAX_CHUNK:
            raise errors.InvalidArgument(
                f"a chunk has {len(chunk)} bytes; at most {MAX_CHUNK} are allowed", field="chunk"
            )
        self._written += len(chunk)
        if self._written > self.size:
            raise errors.InvalidArgument(f"the file is longer than the {self.size} bytes announced", field="chunk")
        self.hash.update(chunk)
        if self._file is not None:
            with self._disk():
                self._file.write(chunk)

    def end(self, *, sync: bool = False) -> None:
        """Completes the file; with `sync`, it is on the disk when this returns. Raises InvalidArgument for a file that
        is shorter than announced."""
        if self._written != self.size:
            raise errors.InvalidArgument(
                f"the file has {self._written} of the {self.size} bytes announced", field="chunk"
            )
        if self._file is None:
            return
        with self._disk():
            self._file.flush()
            if sync:
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file. Buffered data that does not fit on a full disk is dropped."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()


async def header_of(requests: AsyncIterator[Any], what: str) -> Any:
    """Receives the header, the first message of a stream of parts. Raises InvalidArgument."""
    first = await anext(requests, None)
    if first is None or first.WhichOneof("part") != "header":
        raise errors.InvalidArgument(f"{what} must begin with its header", field="header")
    return first.header


async def receive(requests: AsyncIterator[Any], write: Callable[[bytes], None]) -> None:
    """Receives the chunks after the header. Raises InvalidArgument."""
    async for request in requests:
        if request.WhichOneof("part") != "chunk":
            raise errors.InvalidArgument("only chunks may follow the header", field="part")
        await asyncio.to_thread(write, request.chunk)
