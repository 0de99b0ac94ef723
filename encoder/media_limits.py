"""Which images and clips are accepted: formats, limits, and the errors for all others.

Separate from the code that decodes, because frontend processes need this without Pillow and numpy.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from importlib.machinery import PathFinder

RGB = 3
"""Channels of decoded pixels."""
MAX_ASPECT = 200.0
"""Longer side over shorter side of the flattest image or frame that is accepted."""
SLOWEST_RATE = 1e-9
"""Frames per second: a frame every 30 years."""


def known_rate(fps: float | None) -> float | None:
    """The frame rate that a file states or its timestamps give; None for one that no video has."""
    return fps if fps is not None and SLOWEST_RATE < fps < math.inf else None


def _reads_avif() -> bool:
    """Whether Pillow has the decoder, as it has since 11.3. Pillow is not imported."""
    pillow = importlib.util.find_spec("PIL")
    return pillow is not None and PathFinder.find_spec("PIL._avif", pillow.submodule_search_locations) is not None


_AVIF = ("AVIF",) if _reads_avif() else ()
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", *_AVIF)
"""Formats of images that are accepted in this installation, by Pillow's names."""


def video_formats() -> list[str]:
    """Formats that can be opened in this installation, in alphabetical order."""
    containers = ["MP4", "WEBM"] if importlib.util.find_spec("av") else []
    return sorted(["APNG", "GIF", "WEBP", *_AVIF, *containers])


class ImageError(ValueError):
    """An image that is not accepted; the message tells the client why.

    `too_large`: the image exceeds a limit, and nothing else is known to be wrong with it.
    """

    def __init__(self, reason: str, *, too_large: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.too_large = too_large


class VideoError(ImageError):
    """A clip that is not accepted; the message tells the client why."""


@dataclass(frozen=True)
class ImageLimits:
    """Limits on one image, checked before it is decoded."""

    max_bytes: int = 64 << 20
    """Encoded size, in bytes."""
    max_pixels: int = 1 << 26
    """Width times height; 8192 x 8192 by default. Decoding takes about 7 bytes per pixel."""
    max_side: int = 32768
    """Width, and height, in pixels."""
    max_aspect: float = MAX_ASPECT
    """Longer side over shorter side."""

    def check_bytes(self, size: int) -> None:
        if size > self.max_bytes:
            words = f"the image has {size} bytes, more than the {self.max_bytes} that are allowed"
            raise ImageError(words, too_large=True)

    def check_size(self, width: int, height: int) -> None:
        """Raises `ImageError` with both numbers if an image of this size is not allowed."""
        what = f"the image has {width}x{height} pixels"
        if width < 1 or height < 1:
            raise ImageError(f"{what}: it is empty")
        if width * height > self.max_pixels:
            what = f"{what}, {width * height} in all, more than the {self.max_pixels} that are allowed"
            raise ImageError(what, too_large=True)
        if max(width, height) > self.max_side:
            raise ImageError(f"{what}, a side longer than the {self.max_side} that are allowed", too_large=True)
        if max(width, height) > self.max_aspect * min(width, height):
            aspect = max(width, height) / min(width, height)
            raise ImageError(f"{what}, an aspect of {aspect:g} to 1, more than the {self.max_aspect:g} allowed")


@dataclass(frozen=True)
class ImageHeader:
    """Fields of an accepted image's header; width and height are those before the orientation is applied."""

    format: str
    width: int
    height: int
    mode: str


@dataclass(frozen=True)
class VideoLimits:
    """Limits on one clip."""

    max_bytes: int = 256 << 20
    """Encoded size, in bytes."""
    max_frames: int = 20000
    """Frames in the file, used or not, since a frame can only be reached by decoding those before it."""
    max_pixels: int = 1 << 24
    """Width times height of a frame; 4096 x 4096 by default."""
    max_total_pixels: int = 1 << 34
    """Pixels of all decoded frames, which bounds the decoding time; 8,192 frames of 1080p by default."""
    max_side: int = 16384
    max_aspect: float = MAX_ASPECT

    @property
    def frame(self) -> ImageLimits:
        """The limits of one frame."""
        return ImageLimits(self.max_bytes, self.max_pixels, self.max_side, self.max_aspect)

    def check_bytes(self, size: int) -> None:
        if size > self.max_bytes:
            words = f"the video has {size} bytes, more than the {self.max_bytes} that are allowed"
            raise VideoError(words, too_large=True)

    def check(self, frames: int, width: int, height: int) -> None:
        """Raises `VideoError` with both numbers if a clip of `frames` frames of this size exceeds a limit."""
        if frames < 1:
            raise VideoError("the video has no frame")
        if frames > self.max_frames:
            words = f"the video has {frames} frames, more than the {self.max_frames} that are allowed"
            raise VideoError(words, too_large=True)
        if frames * width * height > self.max_total_pixels:
            raise VideoError(
                f"the video has {frames} frames of {width}x{height}, {frames * width * height} pixels in all, more "
                f"than the {self.max_total_pixels} that are allowed",
                too_large=True,
            )
