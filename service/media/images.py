"""Prepares the images and videos of a request: encoded bytes in, an item for the encoder and a content key out.

Synchronous; a frontend runs it in threads. Decoding and cutting into patches are done by an `ImageProcessor`: in a
server that is a pool of processes (`service.media.image_pool`), and no pixel is in this process.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Protocol

from encoder.frames import VideoError, VideoLimits
from encoder.images import ImageError, ImageHeader, ImageLimits
from encoder.item import DTYPE_BYTES, IMAGE
from encoder.stopwatch import Stopwatch
from families import VideoRule, VisionSpec
from service.common import errors
from service.common.types import Image, MediaSource, Video
from service.media.prepared import PreparedItem


@dataclass(frozen=True)
class MediaLimits:
    """Limits on one image and one clip."""

    image: ImageLimits = ImageLimits()
    video: VideoLimits = VideoLimits()
    video_frames: int = 32
    """Largest and default number of frames that are sampled of a clip."""

    @property
    def file(self) -> VideoLimits:
        """For a file that may be an image or a video."""
        return replace(self.video, max_bytes=max(self.image.max_bytes, self.video.max_bytes))

    @property
    def frame(self) -> ImageLimits:
        """For decoded pixels of an image or a frame."""
        return replace(self.image, max_pixels=max(self.image.max_pixels, self.video.max_pixels))

    @property
    def worker_bytes(self) -> int:
        """Memory that decoding and resizing may take beyond what the process uses at its start: pixels as bytes, as
        floats, resized along one axis, and the decoder's own."""
        pixels = self.frame.max_pixels
        return (1 << 30) + 48 * pixels + 3 * self.file.max_bytes


Frame = tuple[int, bytes]
"""A frame that was sent as an image file: its number in the video, for messages, and the file."""


@dataclass(frozen=True)
class PreparedVideo:
    """A video whose frames were sampled by the process that decoded it."""

    item: PreparedItem
    total: int
    """Frames in the file."""
    fps: float | None
    """None if the file does not say."""


class ImageProcessor(Protocol):
    """Turns files into patches. Raises ImageError, or its subclass VideoError, for any file that cannot be decoded,
    ValueError for one that the model cannot take, and Unavailable if nothing can be prepared at the moment. `watch`
    times the stages."""

    def image(self, data: bytes, watch: Stopwatch) -> PreparedItem:
        """Prepares an image."""

    def video(self, data: bytes, frames: int, watch: Stopwatch) -> PreparedVideo:
        """Prepares at most `frames` frames of a video, sampled by the model's rule."""

    def frames(self, files: Sequence[Frame], watch: Stopwatch) -> PreparedItem:
        """Prepares a video whose frames came as images."""

    def describe(self, data: bytes) -> ImageHeader:
        """Format and size of an image or video, without decoding it, whatever the size of the file."""

    def stats(self) -> Mapping[str, float]:
        """Counters since the start."""

    def close(self) -> None:
        """Frees what it holds. Idempotent."""


def video_rule(vision: VisionSpec) -> VideoRule:
    """The model's rule for videos. Raises ValueError for a model without one."""
    rule = vision.video_rule
    if rule is None:
        raise ValueError("this model takes no video: its tower has no projection for temporal patches")
    return rule


def most_bytes(vision: VisionSpec, dtype: str, frames: int | None) -> int:
    """Upper bound on the bytes of an image's patches, or of a video's with so many frames, before its file is read."""
    if frames is None:
        numbers = vision.max_image_tokens * vision.patches_per_token * vision.patch_widths[IMAGE]
    else:
        numbers = video_rule(vision).most_numbers(frames)
    return numbers * DTYPE_BYTES[dtype]


class Preparer:
    """Turns the media of requests into prepared items. Thread-safe."""

    def __init__(
        self, processor: ImageProcessor, vision: VisionSpec, dtype: str, limits: MediaLimits, revision: str
    ) -> None:
        """`dtype`: of the patches, by its name. `revision`: the model's, part of every key."""
        self._processor, self._vision, self._dtype, self._limits = processor, vision, dtype, limits
        self._seed = hashlib.sha256(f"{revision}|{dtype}|{vision}".encode()).digest()
        self._lock = Lock()
        self._counts: Counter[str] = Counter()

    def prepare(self, source: MediaSource, salt: bytes) -> PreparedItem:
        """Raises InvalidArgument with the field at fault."""
        watch = Stopwatch()
        try:
            if isinstance(source, Video):
                return self._video(source, salt, watch)
            item = self._processor.image(source.data, watch)
            return replace(item, field=source.field, key=self._key(salt, b"image", source.data))
        except ImageError as error:
            kind = "VIDEO" if isinstance(source, Video) else "IMAGE"
            raise errors.InvalidArgument(
                f"{source.field}: {error}", reason=f"{kind}_DECODE_FAILED", field=source.field
            ) from error
        except ValueError as error:
            raise errors.InvalidArgument(f"{source.field}: {error}", field=source.field) from error
        finally:
            self._count(source, watch)

    def looked_at(self, source: MediaSource) -> MediaSource:
        """Drops, from a video given as frames, those that will not be sampled, so that they are not fetched."""
        if not isinstance(source, Video) or not source.elsewhere or not source.frames:
            return source
        rule = self._vision.video_rule
        if rule is None:  # rejected later, with the field's name
            return source
        wanted = set(rule.sample(len(source.frames), source.max_frames or self._limits.video_frames))
        frames = (
            frame if index in wanted or not frame.elsewhere else Image(b"", frame.field)
            for index, frame in enumerate(source.frames)
        )
        return Video(source.data, source.field, frames=tuple(frames), fps=source.fps, max_frames=source.max_frames)

    def most_bytes(self, source: MediaSource) -> int:
        """Upper bound on the bytes of the patches of an image or video, before its file is read."""
        frames = None
        if isinstance(source, Video):
            frames = self._limits.video_frames if source.max_frames is None else source.max_frames
        return most_bytes(self._vision, self._dtype, frames)

    def stats(self) -> dict[str, float]:
        """Images, videos and frames since the start, and the seconds spent in each stage."""
        names = ("images", "videos", "frames", "decode_seconds", "resize_seconds", "patch_seconds")
        with self._lock:
            return {name: float(self._counts[name]) for name in names}

    def _count(self, source: MediaSource, watch: Stopwatch) -> None:
        with self._lock:
            self._counts["videos" if isinstance(source, Video) else "images"] += 1
            self._counts["frames"] += watch.frames
            for stage, seconds in watch.seconds.items():
                self._counts[f"{stage}_seconds"] += seconds  # type: ignore[assignment]

    def _video(self, source: Video, salt: bytes, watch: Stopwatch) -> PreparedItem:
        most = self._limits.video_frames
        wanted = most if source.max_frames is None else source.max_frames
        if not 1 <= wanted <= most:
            raise ValueError(f"max_frames is {wanted}; it must be from 1 to {most}")
        rule = video_rule(self._vision)
        if source.frames:
            self._check_frames(source)
            indices = rule.sample(len(source.frames), wanted)
            files = [source.frames[index].data for index in indices]
            item = self._processor.frames(list(zip(indices, files, strict=True)), watch)
            dated, fps, content = len(indices) < len(source.frames), source.fps, files
        else:
            video = self._processor.video(source.data, wanted, watch)
            indices = rule.sample_file(video.total, wanted, lambda: video.fps)
            item, dated, fps, content = video.item, True, video.fps, [source.data]
        labels = rule.labels(len(indices), fps=fps, indices=indices if dated else None)
        key = self._key(salt, b"video%d" % len(indices), *content)
        return replace(item, field=source.field, key=key, labels=tuple(labels), frames=len(indices))

    def _check_frames(self, source: Video) -> None:
        limits = self._limits.video
        size = sum(len(frame.data) for frame in source.frames)
        if size > limits.max_bytes:
            raise VideoError(f"the video has {size} bytes, more than the {limits.max_bytes} that are allowed")
        limits.check(len(source.frames), 1, 1)

    def _key(self, salt: bytes, kind: bytes, *content: bytes) -> bytes:
        """Computed here and not by the decoding worker: the key must belong to the bytes that this client sent."""
        digest = hashlib.sha256(self._seed + len(salt).to_bytes(4, "big") + salt + kind)
        for part in content:
            digest.update(hashlib.sha256(part).digest())
        return digest.digest()
