"""Files that are uploaded once and then referred to by id. Large files of any request are uploaded automatically, see
`uploads`."""

from __future__ import annotations

from saccade._core.images import ImageInput, image_message
from saccade._core.ranges import check_string
from saccade._core.steps import Call, Do, Steps
from saccade._core.uploads import media_from, upload_steps
from saccade.errors import InvalidArgument
from saccade.types import Media
from saccade.v1 import media_pb2


def file_bytes(image: ImageInput) -> bytes:
    """The bytes that `upload` sends. Raises InvalidArgument for an image that is only a reference."""
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


def upload_file_steps(image: ImageInput) -> Steps[Media]:
    data = yield Do(lambda: file_bytes(image))
    return (yield from upload_steps(data))


def get_steps(media_id: str) -> Steps[Media]:
    request = media_pb2.GetMediaRequest(media_id=check_string("media_id", media_id))
    return media_from((yield Call("media", "GetMedia", request)).media)


def delete_steps(media_id: str) -> Steps[None]:
    request = media_pb2.DeleteMediaRequest(media_id=check_string("media_id", media_id))
    yield Call("media", "DeleteMedia", request, deletes=True)
