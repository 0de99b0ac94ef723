"""Receiving files, and full disks: limits from both sides."""

from __future__ import annotations

import asyncio
import errno
import functools
import hashlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from saccade.v1 import media_pb2
from service.common import errors
from service.media.arriving import MAX_CHUNK, ArrivingFile, disk_trouble, header_of, receive


def full(words: str) -> errors.StatusError:
    return errors.ResourceExhausted(words, reason="FULL", quota="bytes")


disk = functools.partial(disk_trouble, "the folder", full)


def file(path: Path, size: int) -> ArrivingFile:
    return ArrivingFile(path / "f", size, disk)


def test_a_file_of_exactly_its_size_in_chunks_of_exactly_the_largest(tmp_path: Path) -> None:
    arriving = file(tmp_path, MAX_CHUNK + 5)
    arriving.write(bytes(MAX_CHUNK))
    with pytest.raises(errors.InvalidArgument, match=f"has {MAX_CHUNK} of the {MAX_CHUNK + 5} bytes"):
        arriving.end()
    arriving.write(b"12345")
    arriving.end(sync=True)
    assert arriving.hash.hexdigest() == hashlib.sha256(bytes(MAX_CHUNK) + b"12345").hexdigest()
    assert (tmp_path / "f").read_bytes() == bytes(MAX_CHUNK) + b"12345"
    with pytest.raises(errors.InvalidArgument, match=f"longer than the {MAX_CHUNK + 5} bytes"):
        arriving.write(b"6")
    arriving.close()


def test_a_chunk_that_is_too_large(tmp_path: Path) -> None:
    arriving = file(tmp_path, 10 * MAX_CHUNK)
    with pytest.raises(errors.InvalidArgument, match=f"a chunk has {MAX_CHUNK + 1} bytes; at most {MAX_CHUNK}"):
        arriving.write(bytes(MAX_CHUNK + 1))
    arriving.close()
    assert not (tmp_path / "f").read_bytes()
    with pytest.raises(FileExistsError):
        file(tmp_path, 1)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_told_as_such(number: int) -> None:
    with pytest.raises(errors.ResourceExhausted, match="the disk of the folder is full"), disk():
        raise OSError(number, "words")


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EROFS])
def test_other_trouble_with_a_disk_is_not(number: int, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(OSError, match="words"), disk():
        raise OSError(number, "words", "/a/secret/place")
    assert "the folder: words" in caplog.text and "secret" not in caplog.text


async def stream(*parts: Any) -> AsyncIterator[Any]:
    for part in parts:
        yield part


def chunks(*data: bytes) -> Iterator[Any]:
    return (media_pb2.UploadMediaRequest(chunk=piece) for piece in data)


HEADER = media_pb2.UploadMediaRequest(header=media_pb2.MediaHeader(size_bytes=3))


def test_a_stream_is_a_header_and_chunks() -> None:
    async def run() -> None:
        got: list[bytes] = []
        requests = stream(HEADER, *chunks(b"a", b"b", b"c"))
        assert (await header_of(requests, "an upload")).size_bytes == 3
        await receive(requests, got.append)
        assert got == [b"a", b"b", b"c"], "in order"
        for wrong in (stream(), stream(*chunks(b"a")), stream(media_pb2.UploadMediaRequest())):
            with pytest.raises(errors.InvalidArgument, match="an upload must begin with its header"):
                await header_of(wrong, "an upload")
        for later in (HEADER, media_pb2.UploadMediaRequest()):
            with pytest.raises(errors.InvalidArgument, match="only chunks may follow the header"):
                await receive(stream(*chunks(b"d"), later), got.append)
        assert got[-1] == b"d"

    asyncio.run(run())
