"""Files that are sent once and named from then on: `client.media` of the two gRPC clients. Large files of any request
go this way by themselves, see `saccade._core.uploads`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from saccade._core.images import ImageInput, image_message
from saccade._core.steps import Call, Steps
from saccade._core.uploads import media_from, upload_steps
from saccade.errors import InvalidArgument
from saccade.types import Media
from saccade.v1 import media_pb2

if TYPE_CHECKING:
    from saccade.aio import AsyncClient
    from saccade.client import SyncClient


def file_bytes(image: ImageInput) -> bytes:
    """What `upload` sends. Raises InvalidArgument for what has no content of its own to send."""
    message = image_message(image)
    source = message.WhichOneof("source")
    if source == "uri":
        raise InvalidArgument(
            f"upload: {message.uri!r} is fetched by the server, in the request that names it; upload takes a path, "
            "bytes, a binary file, an image or an array"
        )
    if source == "media_id":
        raise InvalidArgument(f"upload: {message.media_id!r} has been uploaded already")
    if not message.data:
        raise InvalidArgument("upload: the file is empty, expected 1 byte or more, got 0")
    return message.data


class SyncMedia:
    """`client.media`."""

    def __init__(self, client: SyncClient) -> None:
        self._client = client

    def upload(self, image: ImageInput, *, timeout: float | None = None) -> Media:
        """Sends a picture or a video file, unless it is there already. Its `media_id` may stand for it in requests and
        batches: `images=[media]`, `videos=[media]`."""
        return self._client._steps(upload_steps(file_bytes(image)), timeout)

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
        data = await self._client._beside(file_bytes, image)
        return await self._client._steps(upload_steps(data), timeout)

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
