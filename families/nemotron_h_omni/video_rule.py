"""Converts decoded frames to temporal patches.

The released processor resizes every frame of a clip to one grid near a target size, keeping its aspect ratio. The tower
takes frames in groups: the patch of a group concatenates the same patch of each of its frames. A clip's last frame is
repeated until its group is full. Each group is an attention sequence of its own, so a long clip is encoded in as many
launches as needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from encoder.item import VIDEO, EncoderItem, Grid, ItemLayout, num_image_tokens, retained_tokens
from encoder.media_limits import MAX_ASPECT
from encoder.stopwatch import Stopwatch
from families.frames import checked_frames
from families.nemotron_h_omni.prompt import frame_labels, video_text
from families.nemotron_h_omni.vision_config import VisionConfig

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class OmniVideoRule:
    """Implements `families.family.VideoRule` with the settings of `config`. Raises `ValueError` if the model has no
    video projection."""

    config: VisionConfig

    def __post_init__(self) -> None:
        if self.config.video_temporal_patch_size is None:
            raise ValueError("this model takes no videos: its tower has no projection for temporal patches")

    @property
    def together(self) -> int:
        """Frames in one temporal patch."""
        assert self.config.video_temporal_patch_size is not None
        return self.config.video_temporal_patch_size

    @property
    def pruning_rate(self) -> float:
        """Share of a clip's rows that is dropped after the tower."""
        return self.config.video_pruning_rate

    def sample(self, total: int, count: int) -> list[int]:
        """Indices of at most `count` of `total` frames, evenly spaced from the first (`sample_indices`)."""
        return sample_indices(total, count)

    def sample_file(self, total: int, count: int, fps: Callable[[], float | None]) -> list[int]:
        """Like `sample`: the source's frame rate is not used."""
        return sample_indices(total, count)

    def tokens(self, num_frames: int, height: int, width: int) -> int:
        """Rows that a clip will give the decoder; needs no decoded frame. Raises `ValueError` without frames."""
        if num_frames < 1:
            raise ValueError(f"a clip needs at least 1 frame, got {num_frames}")
        tokens = num_image_tokens(video_grid(height, width, self.config), merge_size=self.config.merge_size)
        return retained_tokens(-(-num_frames // self.together), tokens, self.pruning_rate)

    def most_numbers(self, num_frames: int) -> int:
        """Upper bound of the values in the patches of a clip of `num_frames` frames of any accepted size."""
        return (num_frames + self.together - 1) * most_patches(self.config) * self.config.patch_dim

    def labels(self, num_frames: int, *, fps: float | None = None, indices: Sequence[int] | None = None) -> list[str]:
        """`frame_labels` of the clip's temporal patches."""
        return frame_labels(num_frames, self.together, fps=fps, indices=indices)

    def text(self, item: ItemLayout, labels: Sequence[str], number: int, *, start: str, token: str, end: str) -> str:
        """See `video_text`."""
        return video_text(labels, [1] * len(labels), start=start, token=token, end=end)

    def patchify(
        self, frames: Iterable[torch.Tensor], dtype: torch.dtype, *, num_frames: int | None = None,
        keep_bytes: bool = False, watch: Stopwatch | None = None,
    ) -> EncoderItem:  # fmt: skip
        """Resizes, normalises and cuts a clip, one group of frames at a time.

        `frames`: `[H, W, 3]` uint8, all of one size. They are consumed one by one, so that with a generator only one
        frame is in memory at a time; a generator needs `num_frames`. Returns new memory in `dtype`, or with
        `keep_bytes` in uint8 if no frame needs a resize. Raises `ValueError` naming the first frame that does not fit,
        or both counts if they differ.
        """
        import torch  # imported here: grids and token counts need no torch

        from encoder.preprocess import cut_patches, normalise, resize_pixels

        config, together = self.config, self.together
        num_frames, frames = checked_frames(frames, num_frames)
        watch = watch or Stopwatch()
        grid, patches, size, kept, cut_only = (0, 0), torch.empty(0), (0, 0), dtype, False
        for index, frame_HWC in enumerate(frames):
            if not index:
                height, width = frame_HWC.shape[:2]
                grid = video_grid(height, width, config)
                groups = -(-num_frames // together)
                size = (grid[0] * config.patch_size, grid[1] * config.patch_size)
                cut_only = keep_bytes and size == (height, width)
                kept = torch.uint8 if cut_only else dtype
                patches = torch.empty(groups, grid[0] * grid[1], together, config.patch_dim, dtype=kept)
            pixels_CHW = frame_HWC.permute(2, 0, 1)
            if not cut_only:
                with watch("resize"):
                    pixels_CHW = resize_pixels(pixels_CHW[None], size)[0]
            with watch("patch"):
                if not cut_only:
                    pixels_CHW = normalise(pixels_CHW, config.image_mean, config.image_std)
                cut = cut_patches(pixels_CHW, config.patch_size, kept)
                patches[index // together, :, index % together] = cut
        last = (num_frames - 1) % together
        patches[-1, :, last + 1 :] = patches[-1, :, last : last + 1]
        return EncoderItem(
            grid, patches.view(-1, together * config.patch_dim), kind=VIDEO, num_sequences=len(patches),
            num_frames=num_frames, pruning_rate=self.pruning_rate, merge_size=config.merge_size,
        )  # fmt: skip


def video_grid(height: int, width: int, config: VisionConfig) -> Grid:
    """The patch grid `(gh, gw)` of every frame of a clip of `height` x `width` pixels."""
    if height < 1 or width < 1:
        raise ValueError(f"a frame needs at least one pixel each way, got {height}x{width}")
    target, merge = config.video_target_num_patches, config.merge_size
    if not config.video_maintain_aspect_ratio:
        side = max(merge, int(math.sqrt(target)) // merge * merge)
        return side, side
    aspect = width / height
    rows = max(round(math.sqrt(target / aspect)), 1)
    columns = max(round(math.sqrt(target * aspect)), 1)
    up = (-(-rows // merge) * merge, -(-columns // merge) * merge)
    if up[0] * up[1] <= target:
        return up
    return max(merge, rows // merge * merge), max(merge, columns // merge * merge)


def most_patches(config: VisionConfig) -> int:
    """Upper bound of the patches in `video_grid` of any accepted size: sides are rounded, and a very flat frame keeps
    a side of `merge_size`, so this may be more than `video_target_num_patches`."""
    target, merge = config.video_target_num_patches, config.merge_size
    most = max(target, merge**2)
    if not config.video_maintain_aspect_ratio:
        return most
    longest = math.sqrt(target * MAX_ASPECT)
    for short in range(1, round(math.sqrt(target)) + 1):  # the shorter side before it is rounded to `merge_size`
        long = math.ceil(longest if short == 1 else min(target / (short - 0.5), longest))
        most = max(most, max(merge, short // merge * merge) * max(merge, long // merge * merge))
    return most


def sample_indices(total: int, count: int) -> list[int]:
    """Indices of at most `count` of `total` frames: evenly spaced from the first; all if there are no more than
    `count`."""
    if total < 1 or count < 1:
        raise ValueError(f"{count} of {total} frames: both must be positive")
    if count >= total:
        return list(range(total))
    return [index * total // count for index in range(count)]
