"""Turns files into patches in the current process: decodes them, and applies the model's rules for resizing and
cutting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import groupby

import torch

from encoder.frames import Clip, describe, open_video
from encoder.images import Pixels, decode_pixels
from encoder.media_limits import ImageError, ImageHeader, VideoError
from encoder.stopwatch import Stopwatch
from families import VisionSpec
from service.media.images import Frame, ImageProcessor, MediaLimits, PreparedVideo, video_rule
from service.media.prepared import PreparedItem


class Patcher:
    """An `ImageProcessor` of one model in this process. Thread-safe."""

    def __init__(self, limits: MediaLimits, vision: VisionSpec, dtype: str) -> None:
        """`dtype`: name of the dtype of patches."""
        self._limits, self._vision = limits, vision
        self._dtype: torch.dtype = getattr(torch, dtype)

    def pixels(self, data: bytes) -> Pixels:
        """Decodes an image."""
        return decode_pixels(data, self._limits.image)

    def clip(self, data: bytes) -> Clip:
        """Opens a video."""
        return open_video(data, self._limits.video)

    def describe(self, data: bytes) -> ImageHeader:
        return describe(data, self._limits.file)

    def stats(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None:
        pass

    def image(self, data: bytes, watch: Stopwatch) -> PreparedItem:
        with watch("decode"):
            pixels_HWC = self.pixels(data)
        image = torch.from_numpy(pixels_HWC)
        return PreparedItem(self._vision.image_rule.patchify(image, self._dtype, keep_bytes=True, watch=watch))

    def video(self, data: bytes, frames: int, watch: Stopwatch) -> PreparedVideo:
        with watch("decode"):
            clip = self.clip(data)
        indices = video_rule(self._vision).sample_file(clip.num_frames, frames, lambda: clip.fps)
        # Closes the generators, so that the decoder's resources are released now and not by the garbage collector.
        with closing(clip.frames(list(dict.fromkeys(indices)))) as tensors:
            item = self._item(_repeated(tensors, indices), len(indices), watch)
        return PreparedVideo(item, clip.num_frames, clip.fps)

    def frames(self, files: Sequence[Frame], watch: Stopwatch) -> PreparedItem:
        return self.stream(iter(files), len(files), watch)

    def stream(self, files: Iterator[Frame], count: int, watch: Stopwatch) -> PreparedItem:
        """Like `frames`, for `count` files that are received one by one."""
        return self._item(self._decoded(files, count), count, watch)

    def _item(self, tensors: Iterator[torch.Tensor], count: int, watch: Stopwatch) -> PreparedItem:
        rule, frames = video_rule(self._vision), _timed(tensors, watch)
        return PreparedItem(rule.patchify(frames, self._dtype, num_frames=count, keep_bytes=True, watch=watch))

    def _decoded(self, files: Iterator[Frame], count: int) -> Iterator[torch.Tensor]:
        for index, data in files:
            try:
                pixels_HWC = self.pixels(data)
                self._limits.video.check(count, pixels_HWC.shape[1], pixels_HWC.shape[0])
            except VideoError:
                raise
            except ImageError as error:
                raise VideoError(f"frame {index}: {error}", too_large=error.too_large) from error
            yield torch.from_numpy(pixels_HWC)


def local_processor(limits: MediaLimits, vision: VisionSpec | None, dtype: str) -> ImageProcessor | None:
    """An `ImageProcessor` in this process; None for a model without images."""
    return None if vision is None else Patcher(limits, vision, dtype)


def _repeated(frames: Iterator[torch.Tensor], indices: Sequence[int]) -> Iterator[torch.Tensor]:
    """Yields a frame for each of the ascending `indices`. `frames`: those of the different indices."""
    for frame, (_, same) in zip(frames, groupby(indices), strict=True):
        for _ in same:
            yield frame


def _timed(frames: Iterator[torch.Tensor], watch: Stopwatch) -> Iterator[torch.Tensor]:
    while True:
        with watch("decode"):
            frame = next(frames, None)
        if frame is None:
            return
        watch.frames += 1
        yield frame
