"""Pictures and clips of a request: encoded bytes in, patches for the encoder and a content key out.

Synchronous; the front runs it in a pool of its own. What decodes is behind `Decoder`: that may be another process.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from threading import Lock
from typing import TYPE_CHECKING, Protocol

from encoder.frames import Clip, VideoError, VideoLimits, describe, open_video
from encoder.images import ImageError, ImageHeader, ImageLimits, Pixels, decode_pixels
from encoder.item import IMAGE, EncoderItem
from encoder.stopwatch import Stopwatch
from families import VideoRule, VisionSpec
from service.common import errors
from service.common.types import ImageSource, MediaSource, VideoSource

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Prepared:
    """One picture or clip, ready for the engine."""

    field: str
    """Where it was in the request."""
    item: EncoderItem
    key: bytes
    """Content key: tenant, model revision and preprocessing, content."""
    labels: tuple[str, ...] = ()
    """Of a clip: the words before each temporal patch."""
    frames: int = 0
    """Of a clip: those that were looked at."""


@dataclass(frozen=True)
class MediaLimits:
    """What one picture and one clip may be."""

    image: ImageLimits = ImageLimits()
    video: VideoLimits = VideoLimits()
    video_frames: int = 32
    """Frames of a clip that are looked at, at most and where the request does not say."""

    @property
    def file(self) -> VideoLimits:
        """Of a file that may turn out to be either."""
        return replace(self.video, max_bytes=max(self.image.max_bytes, self.video.max_bytes))

    @property
    def frame(self) -> ImageLimits:
        """Of decoded pixels that may be a picture's or a frame's."""
        return replace(self.image, max_pixels=max(self.image.max_pixels, self.video.max_pixels))

    @property
    def worker_bytes(self) -> int:
        """Memory that decoding either may take, and the decoder's own beside it."""
        pixels = self.frame.max_pixels
        return (1 << 30) + 16 * pixels + 3 * self.file.max_bytes


class Decoder(Protocol):
    """Files to pixels. Raises ImageError, or its child VideoError, whatever the bytes are, and Unavailable where
    nothing can be decoded at the moment."""

    def image(self, data: bytes) -> Pixels:
        """`[H, W, 3]` uint8."""

    def clip(self, data: bytes) -> Clip:
        """An opened clip."""

    def describe(self, data: bytes) -> ImageHeader:
        """Format and size of a picture or clip, undecoded, whatever its number of bytes."""

    def stats(self) -> Mapping[str, float]:
        """Counters since the start."""

    def close(self) -> None:
        """Frees what it holds. Idempotent."""


class LocalDecoder:
    """Decodes in this process."""

    def __init__(self, limits: MediaLimits) -> None:
        self._limits = limits

    def image(self, data: bytes) -> Pixels:
        return decode_pixels(data, self._limits.image)

    def clip(self, data: bytes) -> Clip:
        return open_video(data, self._limits.video)

    def describe(self, data: bytes) -> ImageHeader:
        return describe(data, self._limits.file)

    def stats(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None:
        pass


class Preparer:
    """Makes `Prepared` of what requests hold. Thread-safe."""

    def __init__(self, decoder: Decoder, vision: VisionSpec, dtype: str, limits: MediaLimits, revision: str) -> None:
        """`dtype`: of the patches, as torch calls it. `revision`: the model's, part of every key."""
        import torch

        self._decoder, self._vision, self._limits = decoder, vision, limits
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._seed = hashlib.sha256(f"{revision}|{dtype}|{vision}".encode()).digest()
        self._lock = Lock()
        self._counts: Counter[str] = Counter()

    def prepare(self, source: MediaSource, salt: bytes) -> Prepared:
        """Raises InvalidArgument with the field at fault."""
        watch = Stopwatch()
        try:
            if isinstance(source, VideoSource):
                return self._clip(source, salt, watch)
            with watch("decode"):
                pixels_HWC = self._decoder.image(source.data)
            import torch

            item = self._vision.image_rule.patchify(
                torch.from_numpy(pixels_HWC), self._dtype, keep_bytes=True, watch=watch
            )
            return Prepared(source.field, item, self._key(salt, b"image", source.data))
        except ImageError as error:
            kind = "VIDEO" if isinstance(source, VideoSource) else "IMAGE"
            raise errors.InvalidArgument(
                f"{source.field}: {error}", reason=f"{kind}_DECODE_FAILED", field=source.field
            ) from error
        except ValueError as error:
            raise errors.InvalidArgument(f"{source.field}: {error}", field=source.field) from error
        finally:
            self._count(source, watch)

    def looked_at(self, source: MediaSource) -> MediaSource:
        """A video given as frames, without what has still to be fetched of those that nobody will look at."""
        if not isinstance(source, VideoSource) or not source.elsewhere or not source.frames:
            return source
        rule = self._vision.video_rule
        if rule is None:  # refused later, with the field's name
            return source
        wanted = set(rule.sample(len(source.frames), source.max_frames or self._limits.video_frames))
        frames = (
            frame if index in wanted or not frame.elsewhere else ImageSource(b"", frame.field)
            for index, frame in enumerate(source.frames)
        )
        return VideoSource(
            source.data, source.field, frames=tuple(frames), fps=source.fps, max_frames=source.max_frames
        )

    def most_bytes(self, source: MediaSource) -> int:
        """The most that the patches of a picture or clip can take, before anything is known of it."""
        vision = self._vision
        if not isinstance(source, VideoSource):
            patches = vision.max_image_tokens * vision.patches_per_token
            return patches * vision.patch_widths[IMAGE] * self._dtype.itemsize
        frames = self._limits.video_frames if source.max_frames is None else source.max_frames
        return self._video_rule().most_numbers(frames) * self._dtype.itemsize

    def _video_rule(self) -> VideoRule:
        rule = self._vision.video_rule
        if rule is None:
            raise ValueError("this model takes no video: its tower has no projection for temporal patches")
        return rule

    def stats(self) -> dict[str, float]:
        """Pictures, clips and frames since the start, and the seconds that each stage took."""
        names = ("images", "videos", "frames", "decode_seconds", "resize_seconds", "patch_seconds")
        with self._lock:
            return {name: float(self._counts[name]) for name in names}

    def _count(self, source: MediaSource, watch: Stopwatch) -> None:
        with self._lock:
            self._counts["videos" if isinstance(source, VideoSource) else "images"] += 1
            self._counts["frames"] += watch.frames
            for stage, seconds in watch.seconds.items():
                self._counts[f"{stage}_seconds"] += seconds  # type: ignore[assignment]

    def _clip(self, source: VideoSource, salt: bytes, watch: Stopwatch) -> Prepared:
        most = self._limits.video_frames
        wanted = most if source.max_frames is None else source.max_frames
        if not 1 <= wanted <= most:
            raise ValueError(f"max_frames is {wanted}; it must be from 1 to {most}")
        rule = self._video_rule()
        with watch("decode"):
            clip = _FrameList(source, self._decoder, self._limits) if source.frames else self._decoder.clip(source.data)
        indices = rule.sample(clip.num_frames, wanted)
        # closing: what decodes the frames is given back at once, and not when a collector finds the generators
        with closing(clip.frames(indices)) as frames:
            item = rule.patchify(
                _timed(frames, watch), self._dtype, num_frames=len(indices), keep_bytes=True, watch=watch
            )
        dated = None if source.frames and len(indices) == clip.num_frames else indices
        labels = rule.labels(len(indices), fps=clip.fps, indices=dated)
        content = [source.data] if not source.frames else [source.frames[index].data for index in indices]
        key = self._key(salt, b"video%d" % len(indices), *content)
        return Prepared(source.field, item, key, tuple(labels), len(indices))

    def _key(self, salt: bytes, kind: bytes, *content: bytes) -> bytes:
        digest = hashlib.sha256(self._seed + len(salt).to_bytes(4, "big") + salt + kind)
        for part in content:
            digest.update(hashlib.sha256(part).digest())
        return digest.digest()


class _FrameList(Clip):
    """Frames that came one by one, as a clip."""

    def __init__(self, source: VideoSource, decoder: Decoder, limits: MediaLimits) -> None:
        self._source, self._decoder, self._limits = source, decoder, limits
        size = sum(len(frame.data) for frame in source.frames)
        if size > limits.video.max_bytes:
            raise VideoError(f"the video has {size} bytes, more than the {limits.video.max_bytes} that are allowed")
        limits.video.check(len(source.frames), 1, 1)

    @property
    def num_frames(self) -> int:
        return len(self._source.frames)

    @property
    def fps(self) -> float | None:
        return self._source.fps

    def arrays(self, indices: Sequence[int]) -> Generator[Pixels, None, None]:
        for index in indices:
            try:
                pixels_HWC = self._decoder.image(self._source.frames[index].data)
                self._limits.video.check(len(indices), pixels_HWC.shape[1], pixels_HWC.shape[0])
            except VideoError:
                raise
            except ImageError as error:
                raise VideoError(f"frame {index}: {error}") from error
            yield pixels_HWC


def _timed(frames: Iterator[torch.Tensor], watch: Stopwatch) -> Iterator[torch.Tensor]:
    while True:
        with watch("decode"):
            frame = next(frames, None)
        if frame is None:
            return
        watch.frames += 1
        yield frame
