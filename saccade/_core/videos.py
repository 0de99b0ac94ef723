"""Converts clips, in the forms in which users pass them, to `Video` messages.

A file is sent unchanged. Frames that are given one by one are sent as images, see `_core.images`.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from saccade._core.images import ImageInput, image_message, is_array, is_pillow, located
from saccade._core.ranges import check_string
from saccade.errors import InvalidArgument
from saccade.v1 import types_pb2


@dataclass(frozen=True)
class Video:
    """A clip with options for it."""

    source: Any
    """A path, an https or data URL, the bytes of a GIF, APNG, WebP, AVIF, MP4 or WebM file, or a binary file object; or
    frames: a list of anything that `images=` accepts, or a uint8 array `[T, H, W, C]`."""
    fps: float | None = None
    """Frame rate of a clip that is given as frames; the prompt then has their timestamps. None: the prompt has the
    frames' numbers instead."""
    max_frames: int | None = None
    """At most this many frames are sampled, evenly spaced. None: the server's own limit."""


VideoInput: TypeAlias = "ImageInput | Iterable[ImageInput] | Video | types_pb2.Video"


def video_messages(videos: Iterable[VideoInput] | VideoInput) -> list[types_pb2.Video]:
    """One message per clip. A list holds clips, each of which may be a list of frames; a single file is a list of
    one."""
    if _is_single(videos):
        items: list[Any] = [videos]
    elif isinstance(videos, Iterable):
        items = list(videos)
    else:
        raise InvalidArgument(f"videos: expected a list of clips, got {type(videos).__name__}")
    return [video_message(item, f"videos[{position}]") for position, item in enumerate(items)]


def video_message(video: VideoInput, name: str = "video") -> types_pb2.Video:
    """The message for one clip. Raises InvalidArgument naming it as `name`."""
    if isinstance(video, types_pb2.Video):
        return video
    wrapped = video if isinstance(video, Video) else Video(video)
    source = wrapped.source
    if is_pillow(source) or (is_array(source) and source.ndim <= 3):
        raise InvalidArgument(f"{name}: this is one image; a clip is a file or a list of images")
    if isinstance(source, list | tuple) or is_array(source):
        built = _from_frames(source, wrapped.fps, name)
    elif wrapped.fps is not None:
        raise InvalidArgument(f"{name}: fps is for a list of frames; a file contains its own frame rate")
    else:
        file = image_message(source, name)
        built = types_pb2.Video()
        which = file.WhichOneof("source")
        if which is not None:
            setattr(built, which, getattr(file, which))
    if wrapped.max_frames is not None:
        try:
            built.max_frames = operator.index(wrapped.max_frames)
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"{name}: max_frames: {error}") from error
    return built


def video_from_part(part: Mapping[str, Any], name: str) -> types_pb2.Video | None:
    """The clip inside a chat part of type video or video_url; None if the part is only a placeholder."""
    options = {key: part[key] for key in ("fps", "max_frames") if part.get(key) is not None}
    if part.get("media_id"):
        return video_message(
            Video(types_pb2.Image(media_id=check_string(f"{name}.media_id", part["media_id"])), **options), name
        )
    for key in ("video", "video_url", "url", "path", "data"):
        value = part.get(key)
        if value is not None:
            value = located(value, f"{name}.video_url") if key == "video_url" else value
            if options and not isinstance(value, Video | types_pb2.Video):
                value = Video(value, **options)
            return video_message(value, name)
    return None


def _from_frames(frames: Any, fps: float | None, name: str) -> types_pb2.Video:
    if len(frames) == 0:
        raise InvalidArgument(f"{name}: expected 1 frame or more, got 0")
    built = types_pb2.Video()
    built.frames.images.extend(image_message(frame, f"{name}[{i}]") for i, frame in enumerate(frames))
    if fps is not None:
        try:
            built.frames.fps = fps
        except TypeError as error:
            raise InvalidArgument(f"{name}: fps: {error}") from error
    return built


def _is_single(value: Any) -> bool:
    kinds = (str, os.PathLike, bytes, bytearray, memoryview, Video, types_pb2.Video)
    return isinstance(value, kinds) or hasattr(value, "read") or is_pillow(value) or is_array(value)
