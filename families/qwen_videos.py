"""Converts decoded frames to temporal patches, chooses the frames of a clip, and writes their timestamps.

The released processor samples frames evenly, two per second, and resizes all frames of a clip to one size, which
depends on a limit for the whole clip. Frames are joined in pairs: the patch of a pair holds the same patch of both
frames, channel by channel. An odd last frame is repeated. Each pair is one attention sequence of the tower.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from encoder.item import BLOCK_MAJOR, IMAGE, VIDEO, EncoderItem, Grid, ItemLayout, num_image_tokens
from encoder.media_limits import RGB
from encoder.stopwatch import Stopwatch
from families.frames import check_tokens, checked_frames
from families.qwen_images import check_shape, cut_blocks, normalised
from families.qwen_media import MAX_ASPECT, QwenMedia
from families.tiles import fit_pixels

if TYPE_CHECKING:
    import torch

UNKNOWN_FPS = 24.0
"""Frames per second that are assumed if the source does not say."""


@dataclass(frozen=True)
class QwenVideoRule:
    """Implements `families.family.VideoRule` with the settings of `config`."""

    config: QwenMedia

    pruning_rate = 0.0
    """All rows of a clip are kept."""

    @property
    def together(self) -> int:
        """Frames in one temporal patch."""
        return self.config.temporal_patch_size

    def sample(self, total: int, count: int) -> list[int]:
        """Evenly spaced frames from the first to the last; all if there are no more than `count`."""
        if total < 1 or count < 1:
            raise ValueError(f"{count} of {total} frames: both must be positive")
        wanted = min(count, total, self.config.sampling.max_frames)
        import numpy as np  # imported here: a frontend process without videos needs none

        return [int(index) for index in np.linspace(0, total - 1, wanted).round()]

    def sample_file(self, total: int, count: int, fps: Callable[[], float | None]) -> list[int]:
        """Like `sample`, with as many frames as the model's sampling rate gives, at most `count`. Raises `ValueError`
        if the source's rate is not positive."""
        rate = fps() or UNKNOWN_FPS
        if not 0 < rate < math.inf:
            raise ValueError(f"a video of {rate} frames per second: the rate must be above 0")
        sampling = self.config.sampling
        return self.sample(total, min(count, max(int(total / rate * sampling.fps), sampling.min_frames)))

    def grid(self, num_frames: int, height: int, width: int) -> Grid:
        """The patch grid of every frame of a clip of `num_frames` frames of `height` x `width` pixels."""
        config = self.config
        rows, columns = resized_frame(num_frames, height, width, config)
        return rows // config.patch_size, columns // config.patch_size

    def tokens(self, num_frames: int, height: int, width: int) -> int:
        """Rows that a clip will give the decoder; needs no decoded frame. Raises `ValueError` without frames."""
        each = num_image_tokens(self.grid(num_frames, height, width), merge_size=self.config.merge_size)
        return -(-num_frames // self.together) * each

    def most_numbers(self, num_frames: int) -> int:
        """Upper bound of the values in the patches of a clip of at most `num_frames` frames of any size."""
        return RGB * max(_most_pixels(count, self.config) for count in range(1, num_frames + 1))

    def patchify(
        self, frames: Iterable[torch.Tensor], dtype: torch.dtype, *, num_frames: int | None = None,
        keep_bytes: bool = False, watch: Stopwatch | None = None,
    ) -> EncoderItem:  # fmt: skip
        """Resizes and cuts a clip, one frame at a time, and normalises the patches unless `keep_bytes`, as for images.

        `frames`: `[H, W, 3]` uint8, all of one size; for a generator, `num_frames` says how many it yields. Raises
        `ValueError` naming the first frame that does not fit, or both counts if they differ.
        """
        import torch  # imported here: grids and token counts need no torch

        num_frames, frames = checked_frames(frames, num_frames)
        config, together, watch = self.config, self.together, watch or Stopwatch()
        grid, patches = (0, 0), torch.empty(0, 0, 0, 0, 0, dtype=torch.uint8)
        for index, frame_HWC in enumerate(frames):
            if not index:
                grid = self.grid(num_frames, frame_HWC.shape[0], frame_HWC.shape[1])
                pairs = -(-num_frames // together)
                check_tokens(pairs * num_image_tokens(grid, merge_size=config.merge_size), config.max_model_len)
                shape = pairs, grid[0] * grid[1], RGB, together, config.patch_size**2
                patches = torch.empty(shape, dtype=torch.uint8)
            with watch("resize"):
                size = grid[0] * config.patch_size, grid[1] * config.patch_size
                resized_HWC = resize_frame(frame_HWC, size)
            with watch("patch"):
                cut = cut_blocks(resized_HWC, config.patch_size, config.merge_size)
                patches[index // together, :, :, index % together] = cut.view(-1, RGB, config.patch_size**2)
        last = (num_frames - 1) % together
        patches[-1, :, :, last + 1 :] = patches[-1, :, :, last : last + 1]
        flat = patches.view(-1, config.patch_widths[VIDEO])
        if not keep_bytes:
            with watch("patch"):
                flat = normalised_frames(flat, config.video.mean, config.video.std).to(dtype)
        return EncoderItem(
            grid, flat, kind=VIDEO, num_sequences=len(patches), num_frames=num_frames, merge_size=config.merge_size,
            order=BLOCK_MAJOR,
        )  # fmt: skip

    def labels(self, num_frames: int, *, fps: float | None = None, indices: Sequence[int] | None = None) -> list[str]:
        """`<1.5 seconds>` for each pair: the mean of its frames' timestamps."""
        if num_frames < 1:
            raise ValueError(f"a clip needs at least 1 frame, got {num_frames}")
        known = list(range(num_frames)) if indices is None else list(indices)
        known += known[-1:] * (-len(known) % self.together)
        rate = fps or UNKNOWN_FPS
        moments = [index / rate for index in known]
        pairs = range(0, len(moments), self.together)
        return [f"<{(moments[first] + moments[first + self.together - 1]) / 2:.1f} seconds>" for first in pairs]

    def text(self, item: ItemLayout, labels: Sequence[str], number: int, *, start: str, token: str, end: str) -> str:
        """For each pair its label, `start`, `token` and `end`."""
        return "".join(label + start + token + end for label in labels)


def resized_frame(num_frames: int, height: int, width: int, config: QwenMedia) -> tuple[int, int]:
    """Height and width that each frame of a clip is resized to: the rule for images, with limits on the pixels of all
    frames together. A clip of one frame counts as a pair (the released processor rejects it)."""
    if num_frames < 1:
        raise ValueError(f"a clip needs a frame, got {num_frames}")
    factor, together = config.factor, config.temporal_patch_size
    num_frames = max(num_frames, together)
    if height < 1 or width < 1:
        check_shape(height, width)
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    check_shape(height, width)
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    frames = round(num_frames / together) * together
    size, nearest = (num_frames, height, width), (frames, rows, columns)
    return fit_pixels(size, nearest, factor, config.video.min_pixels, _limit(num_frames, config))


def _limit(num_frames: int, config: QwenMedia) -> int:
    """Most pixels of all frames of a clip together. A limit on each frame may raise it above `max_pixels`."""
    low, high = config.video.min_pixels, config.video.max_pixels
    if (most := config.sampling.frame_tokens) is None:
        return high
    return max(min(most * config.factor**2, high // num_frames), int(low * 1.05)) * num_frames


def _most_pixels(num_frames: int, config: QwenMedia) -> int:
    """Upper bound of the pixels in the patches of a clip of exactly `num_frames` frames of any size."""
    factor, together = config.factor, config.temporal_patch_size
    num_frames = max(num_frames, together)
    padded = -(-num_frames // together) * together
    # A clip is compared with its limit by a rounded number of frames: five in pairs count as four, and become six.
    counted = min(round(num_frames / together) * together, num_frames)
    grown = (math.isqrt(config.video.min_pixels // num_frames) + 8 * factor) ** 2
    # A flat frame keeps a side of one token.
    return max(_limit(num_frames, config) * padded // counted, padded * grown, padded * MAX_ASPECT * factor**2)


def resize_frame(frame_HWC: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """`[*size, 3]` uint8: torch's bicubic filter with antialiasing on bytes, which torchvision uses for videos. It
    differs from Pillow's by one or two levels."""
    from encoder.preprocess import resize_uint8

    return resize_uint8(frame_HWC, size, mode="bicubic")


def normalised_frames(patches_TP: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
    """Normalises uint8 patches of a clip to float32, rounding like torchvision, which differs from the rounding for
    images."""
    from encoder.preprocess import normalise

    planes = patches_TP.view(patches_TP.shape[0], RGB, -1).float()
    return normalise(planes[..., None], mean, std)[..., 0].view(patches_TP.shape)


def as_floats(patches_TP: torch.Tensor, kind: str, config: QwenMedia, dtype: torch.dtype) -> torch.Tensor:
    """Normalises uint8 patches of an image or a clip like the released processors; others only get the dtype."""
    import torch

    if patches_TP.dtype != torch.uint8:
        return patches_TP.to(dtype)
    if kind == IMAGE:
        return normalised(patches_TP, config.image.mean, config.image.std).to(dtype)
    return normalised_frames(patches_TP, config.video.mean, config.video.std).to(dtype)
