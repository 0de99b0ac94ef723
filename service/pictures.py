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
from typing import Protocol

import torch

from encoder.config import VisionConfig
from encoder.frames import Clip, VideoError, VideoLimits, describe, open_video
from encoder.images import ImageError, ImageHeader, ImageLimits, Pixels, decode_pixels
from encoder.item import EncoderItem
from encoder.preprocess import Stopwatch, patchify
from encoder.video import frame_labels, patchify_video, sample_indices, temporal_patch
from service import errors
from service.types import MediaSource, VideoSource


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

    def __init__(
        self, decoder: Decoder, vision: VisionConfig, dtype: torch.dtype, limits: MediaLimits, revision: str
    ) -> None:
        """`dtype`: of the patches. `revision`: the model's, part of every key."""
        self._decoder, self._vision, self._dtype, self._limits = decoder, vision, dtype, limits
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
            item = patchify(torch.from_numpy(pixels_HWC), self._vision, self._dtype, keep_bytes=True, watch=watch)
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

    def most_bytes(self, source: MediaSource) -> int:
        """The most that the patches of a picture or clip can take, before anything is known of it."""
        vision = self._vision
        patch = vision.patch_dim * self._dtype.itemsize
        if not isinstance(source, VideoSource):
            return vision.max_image_tokens * vision.patches_per_token * patch
        frames = self._limits.video_frames if source.max_frames is None else source.max_frames
        return (frames + temporal_patch(vision) - 1) * vision.video_target_num_patches * patch

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
        with watch("decode"):
            clip = _FrameList(source, self._decoder, self._limits) if source.frames else self._decoder.clip(source.data)
        indices = sample_indices(clip.num_frames, wanted)
        # closing: what decodes the frames is given back at once, and not when a collector finds the generators
        with closing(clip.frames(indices)) as frames:
            item = patchify_video(
                _timed(frames, watch), self._vision, self._dtype, num_frames=len(indices),
                pruning_rate=self._vision.video_pruning_rate, keep_bytes=True, watch=watch,
            )  # fmt: skip
        dated = None if source.frames and len(indices) == clip.num_frames else indices
        labels = frame_labels(len(indices), temporal_patch(self._vision), fps=clip.fps, indices=dated)
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
