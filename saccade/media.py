"""Pictures that are sent once and named from then on: `client.media` of the two gRPC clients. Large pictures of any
request go this way by themselves."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from saccade.errors import NotFound, RateLimited, Unimplemented
from saccade.images import ImageInput, image_message
from saccade.steps import Call, Steps
from saccade.types import Media
from saccade.v1 import media_pb2, types_pb2

if TYPE_CHECKING:
    from saccade.aio import AsyncClient
    from saccade.client import SyncClient

CHUNK_BYTES = 2**20
UPLOAD_ABOVE = 2 * 2**20
FRESH_SECONDS = 900.0
"""An upload that expires within this time is sent again: it has to outlast the requests that name it."""


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


def upload_steps(data: bytes) -> Steps[Media]:
    """Asks first: what is there for long enough is not sent again."""
    media_id = hashlib.sha256(data).hexdigest()
    try:
        answer = yield Call("media", "GetMedia", media_pb2.GetMediaRequest(media_id=media_id))
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

    answer = yield Call("media", "UploadMedia", messages)
    return media_from(answer.media)


def files(request: Any) -> Iterator[types_pb2.Image | types_pb2.Video]:
    """The pictures and clips of any request that takes a prompt; of a clip that is a list of frames, these."""
    match request.WhichOneof("input"):
        case "chat":
            parts = [part for message in request.chat.messages for part in message.parts]
            yield from (part.image for part in parts if part.HasField("image"))
            videos = [part.video for part in parts if part.HasField("video")]
        case "image":
            yield request.image
            return
        case None:
            return
        case name:
            yield from getattr(request, name).images
            videos = list(getattr(request, name).videos)
    for video in videos:
        yield from video.frames.images if video.HasField("frames") else (video,)


def upload_large_steps(request: Any, above: int | None) -> Steps[None]:
    """Replaces pictures and clips of more than `above` bytes by their ids. A server that does not take uploads, or has
    no room for them now, gets them as they are."""
    if above is None:
        return
    for file in files(request):
        if len(file.data) > above:
            try:
                media = yield from upload_steps(file.data)
            except Unimplemented:
                return
            except RateLimited as error:
                if error.reason != "MEDIA_SPOOL_FULL":
                    raise
                return
            file.media_id = media.media_id


class SyncMedia:
    """`client.media`."""

    def __init__(self, client: SyncClient) -> None:
        self._client = client

    def upload(self, image: ImageInput, *, timeout: float | None = None) -> Media:
        """Sends a picture or a video file, unless it is there already. Its `media_id` may stand for it in requests and
        batches: `images=[media]`, `videos=[media]`."""
        return self._client._steps(upload_steps(image_message(image).data), timeout)

    def get(self, media_id: str, *, timeout: float | None = None) -> Media:
        """Raises NotFound."""
        return self._client._steps(get_steps(media_id), timeout)

    def delete(self, media_id: str, *, timeout: float | None = None) -> None:
        """Raises NotFound."""
        self._client._steps(delete_steps(media_id), timeout)


class AsyncMedia:
    """`client.media` of the asyncio client; see `SyncMedia`."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def upload(self, image: ImageInput, *, timeout: float | None = None) -> Media:
        """Sends a picture or a video file, unless it is there already."""
        message = await self._client._beside(image_message, image)
        return await self._client._steps(upload_steps(message.data), timeout)

    async def get(self, media_id: str, *, timeout: float | None = None) -> Media:
        """Raises NotFound."""
        return await self._client._steps(get_steps(media_id), timeout)

    async def delete(self, media_id: str, *, timeout: float | None = None) -> None:
        """Raises NotFound."""
        await self._client._steps(delete_steps(media_id), timeout)


def get_steps(media_id: str) -> Steps[Media]:
    return media_from((yield Call("media", "GetMedia", media_pb2.GetMediaRequest(media_id=media_id))).media)


def delete_steps(media_id: str) -> Steps[None]:
    yield Call("media", "DeleteMedia", media_pb2.DeleteMediaRequest(media_id=media_id))
