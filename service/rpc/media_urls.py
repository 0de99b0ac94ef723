"""Images and videos that requests in other servers' protocols name by URLs."""

from __future__ import annotations

from saccade._core.data_urls import decode_data_url, is_data_url
from saccade.v1 import types_pb2
from service.common import errors


def set_source(file: types_pb2.Image | types_pb2.Video, url: str, field: str) -> None:
    """Sets the file's bytes, if they are in a data URL, or else its URL. Raises InvalidArgument with the name of the
    field."""
    if not is_data_url(url):
        file.uri = url
        return
    try:
        file.data = decode_data_url(url)
    except ValueError as error:
        raise errors.InvalidArgument(f"{field}: {error}", field=field) from None
