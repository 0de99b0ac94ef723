"""Limits on images and videos, and the interface `ImageProcessor`, which turns files into patches. A server implements
it with a pool of processes (`service.media.image_pool`), `LocalClient` in its own process (`service.media.patches`)."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from encoder.item import DTYPE_BYTES, IMAGE
from encoder.media_limits import ImageHeader, ImageLimits, VideoLimits
from encoder.stopwatch import Stopwatch
from families import VideoRule, VisionSpec
from service.media.prepared import PreparedItem

LENGTH = struct.Struct("!I")
"""The length in bytes that precedes each message between the pool and its processes."""


def framed(message: Mapping[str, Any]) -> bytes:
    """Encodes a message between the pool and its processes: the length of its JSON, and the JSON."""
    words = json.dumps(message).encode()
    return LENGTH.pack(len(words)) + words


@dataclass(frozen=True)
class MediaLimits:
    """Limits on one image and one clip."""

    image: ImageLimits = ImageLimits()
    video: VideoLimits = VideoLimits()
    video_frames: int = 32
    """Largest number of frames that are sampled from a clip, and the default."""

    @property
    def file(self) -> VideoLimits:
        """Limits on a file that may be an image or a video."""
        return replace(self.video, max_bytes=max(self.image.max_bytes, self.video.max_bytes))

    @property
    def frame(self) -> ImageLimits:
        """Limits on the decoded pixels of an image or a frame."""
        return replace(self.image, max_pixels=max(self.image.max_pixels, self.video.max_pixels))

    @property
    def worker_bytes(self) -> int:
        """Bytes of memory that decoding and resizing may take in addition to what the process uses at its start: for
        pixels as bytes, as floats and resized along one axis, for files, and for the decoder itself."""
        pixels = self.frame.max_pixels
        return (1 << 30) + 48 * pixels + 3 * self.file.max_bytes


Frame = tuple[int, bytes]
"""A frame that was sent as an image file: its number in the video, for error messages, and the file."""


@dataclass(frozen=True)
class PreparedVideo:
    """A video whose frames were sampled by the process that decoded it."""

    item: PreparedItem
    total: int
    """Frames in the file."""
    fps: float | None
    """Frames per second; None if the file does not contain them."""


class ImageProcessor(Protocol):
    """Turns files into patches. Methods raise ImageError, or its subclass VideoError, for any file that cannot be
    decoded, ValueError for one that the model does not accept, and Unavailable if nothing can be prepared at the
    moment. `watch` measures the stages."""

    def image(self, data: bytes, watch: Stopwatch) -> PreparedItem:
        """Prepares an image."""

    def video(self, data: bytes, frames: int, watch: Stopwatch) -> PreparedVideo:
        """Prepares at most `frames` frames of a video, which the model's rule samples."""

    def frames(self, files: Sequence[Frame], watch: Stopwatch) -> PreparedItem:
        """Prepares a video whose frames came as images."""

    def describe(self, data: bytes) -> ImageHeader:
        """Format and size in pixels of an image or video, which is not decoded, however large its file is."""

    def stats(self) -> Mapping[str, float]:
        """Counters since the start."""

    def close(self) -> None:
        """Releases all resources. Idempotent."""


def video_rule(vision: VisionSpec) -> VideoRule:
    """The model's rule for videos. Raises ValueError for a model without one."""
    rule = vision.video_rule
    if rule is None:
        raise ValueError("this model does not accept videos")
    return rule


def most_bytes(vision: VisionSpec, dtype: str, frames: int | None) -> int:
    """Upper bound on the bytes of the patches of an image (`frames` None) or of a video with `frames` frames, before
    its file is read."""
    if frames is None:
        numbers = vision.max_image_tokens * vision.patches_per_token * vision.patch_widths[IMAGE]
    else:
        numbers = video_rule(vision).most_numbers(frames)
    return numbers * DTYPE_BYTES[dtype]
