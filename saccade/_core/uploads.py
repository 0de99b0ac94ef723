"""Steps, without I/O, that upload large files of a request, refer to them by id, and upload them again to a server that
does not have them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from saccade._core.affinity import files, prompt_key
from saccade._core.steps import Call, Steps
from saccade.errors import MessageTooLarge, NotFound, PermissionDenied, RateLimited, SaccadeError, Unimplemented
from saccade.types import Media
from saccade.v1 import media_pb2, types_pb2

CHUNK_BYTES = 240 * 2**10
"""Bytes of a file in one message. The message must not exceed the smallest max_message_bytes that servers have in
practice: with a chunk of 256 KiB it would, by the bytes around the chunk."""
FRESH_SECONDS = 900.0
"""An upload that expires within this many seconds is sent again: it must outlive the requests that refer to it."""
_SPOOL_FULL = frozenset({"MEDIA_SPOOL_FULL"})
_ROUNDS = 6
"""How often files too large for a message are uploaded again, since each replica of a server needs them."""


def media_from(message: media_pb2.Media) -> Media:
    return Media(
        media_id=message.media_id,
        size_bytes=message.size_bytes,
        width=message.width,
        height=message.height,
        format=message.format,
        expires=message.expire_time.ToMilliseconds() / 1000,
    )


def chunks(data: bytes) -> Iterator[bytes]:
    for start in range(0, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]


def upload_steps(
    data: bytes, *, ask: bool = True, give_up: frozenset[str] = frozenset(), affinity: str = ""
) -> Steps[Media]:
    """Uploads a file.

    Args:
        ask: first ask whether the server will keep the file long enough, and do not send it in that case.
        affinity: key of the replica; the file's own if empty.
    """
    media_id = hashlib.sha256(data).hexdigest()
    affinity = affinity or media_id
    if ask:
        try:
            request = media_pb2.GetMediaRequest(media_id=media_id)
            answer = yield Call("media", "GetMedia", request, affinity=affinity)
            media = media_from(answer.media)
            if media.expires > time.time() + FRESH_SECONDS:
                return media
        except NotFound:
            pass

    def messages() -> Iterator[media_pb2.UploadMediaRequest]:
        header = media_pb2.MediaHeader(size_bytes=len(data), media_id=media_id)
        yield media_pb2.UploadMediaRequest(header=header)
        for chunk in chunks(data):
            yield media_pb2.UploadMediaRequest(chunk=chunk)

    answer = yield Call("media", "UploadMedia", messages, give_up, affinity)
    return media_from(answer.media)


class Uploads:
    """The files of one request that are uploaded automatically.

    A restarted server has lost them, and another replica behind the same address never had them. In both cases the
    request is sent again with the files inside or, if they are too large for a message, after uploading them again.

    Args:
        request: changed in place.
        above: files of more bytes than this are uploaded; None: none.
    """

    def __init__(self, request: Any, above: int | None) -> None:
        self._request = request
        self._above = above
        self._sent: list[tuple[types_pb2.Image | types_pb2.Video, bytes]] = []
        self._inline = False
        self.too_large = False
        """Whether a file fits in no message, so that only replicas that have the uploads can answer."""
        self._rounds = 0
        self._affinity = ""

    def steps(self) -> Steps[None]:
        """Replaces large files by their ids. Files stay in the request if the server does not accept uploads from this
        caller, or has no space for them."""
        if self._above is None:
            return
        for file in files(self._request):
            data = file.data
            if len(data) <= self._above:
                continue
            # The key stays the same when the first file is replaced by its id.
            self._affinity = self._affinity or prompt_key(self._request)
            try:
                media = yield from upload_steps(data, give_up=_SPOOL_FULL, affinity=self._affinity)
            except (Unimplemented, PermissionDenied):
                return
            except RateLimited as error:
                if error.reason not in _SPOOL_FULL:
                    raise
                return
            self._sent.append((file, data))
            file.media_id = media.media_id

    def recovery(self, error: SaccadeError) -> Steps[None] | None:
        """Steps to take before the request is sent again; None if the error is not about these uploads."""
        if not self._sent:
            return None
        if not self._inline and isinstance(error, NotFound) and error.reason == "MEDIA_NOT_FOUND":
            return self._again() if self.too_large else self._in_the_request()
        if self._inline and isinstance(error, MessageTooLarge):
            self.too_large = True
            return self._again()
        return None

    def _in_the_request(self) -> Steps[None]:
        for file, data in self._sent:
            file.data = data
        self._inline = True
        yield from ()

    def _again(self) -> Steps[None] | None:
        self._rounds += 1
        return self._uploaded_again() if self._rounds <= _ROUNDS else None

    def _uploaded_again(self) -> Steps[None]:
        for file, data in self._sent:
            media = yield from upload_steps(data, ask=False, affinity=self._affinity)
            file.media_id = media.media_id
        self._inline = False


def call_steps(call: Call, upload_above: int | None) -> Steps[Any]:
    """One call, with the large files of its request uploaded."""
    uploads = Uploads(call.message, upload_above)
    yield from uploads.steps()
    while True:
        try:
            return (yield replace(call, stays=uploads.too_large))
        except SaccadeError as error:
            recovery = uploads.recovery(error)
            if recovery is None:
                raise
        yield from recovery
