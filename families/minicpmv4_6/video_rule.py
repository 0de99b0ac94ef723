"""Chooses the frames of a video, and converts them to flattened patches: each frame is cut like an image.

The released processor takes one frame per second. Of a video that is longer than its limit on frames, it takes evenly
spaced ones. Shapes: H, W pixels; p the patch side; T patches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from encoder.item import VIDEO, EncoderItem, ItemLayout
from encoder.media_limits import RGB
from encoder.stopwatch import Stopwatch
from families.frames import checked_frames
from families.minicpmv4_6.image_rule import (
    check_parts,
    cut_part,
    numbered,
    part_grid,
    resized_size,
    sliced_text,
    slices_of,
)
from families.minicpmv4_6.slicing import Part, Slicing
from families.minicpmv4_6.vision_config import VisionConfig
from families.qwen_videos import UNKNOWN_FPS, normalised_frames, resize_frame

if TYPE_CHECKING:
    import torch

STEP = 0.1
"""Seconds between the frames of a long video from which the evenly spaced ones are taken."""


@dataclass(frozen=True)
class SlicedVideoRule:
    """Implements `families.family.VideoRule` with the settings of `config`, which has some for videos."""

    config: VisionConfig

    pruning_rate = 0.0
    """All rows of a video are kept."""

    @property
    def slicing(self) -> Slicing:
        """The settings for frames."""
        assert self.config.video is not None, "a model without videos"
        return self.config.video

    slices_first = False

    @property
    def most_slices(self) -> int:
        return self.slicing.most_slices

    def sample(self, total: int, count: int) -> list[int]:
        """Evenly spaced frames from the first to the last; all if there are no more than `count`."""
        if total < 1 or count < 1:
            raise ValueError(f"{count} of {total} frames: both must be positive")
        return _evenly(range(total), min(count, self.config.max_video_frames))

    def sample_file(self, total: int, count: int, fps: Callable[[], float | None]) -> list[int]:
        """One frame per second or, of a video of more seconds than frames are allowed, evenly spaced ones. Raises
        `ValueError` if the source's rate is not positive."""
        rate = fps() or UNKNOWN_FPS
        if not 0 < rate < math.inf:
            raise ValueError(f"a video of {rate} frames per second: the rate must be above 0")
        if total < 1 or count < 1:
            raise ValueError(f"{count} of {total} frames: both must be positive")
        most, seconds = min(count, self.config.max_video_frames), total / rate
        if seconds <= most:
            return [min(int(second * rate), total - 1) for second in range(math.ceil(seconds))]
        steps = range(int(seconds / STEP))
        return [min(int(round(step * STEP, 1) * rate), total - 1) for step in _evenly(steps, most)]

    def tokens(self, num_frames: int, height: int, width: int) -> int:
        """Rows that a video will give the decoder; needs no decoded frame."""
        return num_frames * sum(part.pixels for part in self._parts(height, width)) // self.config.factor**2

    def most_numbers(self, num_frames: int) -> int:
        """Upper bound of the values in the patches of a video of at most `num_frames` frames of any size."""
        most, limit = num_frames * self.slicing.most_pixels(self.config.factor), self.config.max_model_len
        return RGB * (most if limit is None else min(most, limit * self.config.factor**2))

    def patchify(
        self, frames: Iterable[torch.Tensor], dtype: torch.dtype, *, num_frames: int | None = None,
        keep_bytes: bool = False, watch: Stopwatch | None = None,
    ) -> EncoderItem:  # fmt: skip
        """Resizes and cuts a video, one frame at a time, and normalises the patches unless `keep_bytes`, as for images.

        `frames`: `[H, W, 3]` uint8, all of one size; for a generator, `num_frames` says how many it yields. Raises
        `ValueError` naming the first frame that does not fit, or both counts if they differ.
        """
        import torch  # imported here: token counts need no torch

        num_frames, frames = checked_frames(frames, num_frames)
        config, watch = self.config, watch or Stopwatch()
        parts: list[Part] = []
        patches_FTP = torch.empty(0, 0, 0, dtype=torch.uint8)
        for index, frame_HWC in enumerate(frames):
            if not index:
                parts = self._parts(frame_HWC.shape[0], frame_HWC.shape[1])
                check_parts(config, parts, frames=num_frames)
                each = sum(part.pixels for part in parts) // config.patch_size**2
                patches_FTP = torch.empty(num_frames, each, config.patch_dim, dtype=torch.uint8)
            first = 0
            for part in parts:
                with watch("resize"):
                    resized_HWC = resize_frame(frame_HWC, resized_size(part))
                with watch("patch"):
                    cut = cut_part(resized_HWC, part, config.patch_size)
                    patches_FTP[index, first : first + len(cut)] = cut
                first += len(cut)
        flat = patches_FTP.view(-1, config.patch_dim)
        if not keep_bytes:
            with watch("patch"):
                flat = normalised_frames(flat, self.slicing.mean, self.slicing.std).to(dtype)
        slices, slice_grid = slices_of(parts, config)
        return EncoderItem(
            part_grid(parts[0], config), flat, kind=VIDEO, num_sequences=num_frames * (1 + slices[0] * slices[1]),
            num_frames=num_frames, slices=slices, slice_grid=slice_grid, merge_size=config.merge_size,
        )  # fmt: skip

    def labels(self, num_frames: int, *, fps: float | None = None, indices: Sequence[int] | None = None) -> list[str]:
        """An empty string for each frame: the model is not told their times."""
        return [""] * num_frames

    def text(self, item: ItemLayout, labels: Sequence[str], number: int, *, start: str, token: str, end: str) -> str:
        """The video's number, then each frame with its slices."""
        words = numbered(number, self.config) if self.config.number_videos else ""
        return words + sliced_text(item, token) * item.num_frames

    def _parts(self, height: int, width: int) -> list[Part]:
        return self.slicing.parts(height, width, self.config.factor)


def _evenly(indices: range, count: int) -> list[int]:
    """At most `count` of the indices, from the first to the last, rounded down."""
    import numpy as np  # imported here: a frontend process without videos needs none

    if len(indices) <= count:
        return list(indices)
    return [indices[int(place)] for place in np.linspace(0, len(indices) - 1, count, dtype=int)]
