"""Converts a decoded image to flattened patches: the released image processor's grid rule, resize and normalisation.

Shapes: H, W pixels; C = 3 channels; p the patch side; gh, gw the patch grid; T = gh * gw patches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from encoder.item import EncoderItem, Grid
from encoder.stopwatch import Stopwatch
from families.frames import check_pixels
from families.nemotron_h_omni.vision_config import VisionConfig

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class OmniImageRule:
    """Implements `families.family.ImageRule` with the settings of `config`."""

    config: VisionConfig

    def grid(self, height: int, width: int) -> Grid:
        """`target_grid` of an image of `height` x `width` pixels."""
        config = self.config
        return target_grid(
            height,
            width,
            patch_size=config.patch_size,
            min_patches=config.min_num_patches,
            max_patches=config.patch_budget,
            merge_size=config.merge_size,
        )

    def patchify(
        self, image_HWC: torch.Tensor, dtype: torch.dtype, *, keep_bytes: bool = False, watch: Stopwatch | None = None
    ) -> EncoderItem:
        """Resizes, normalises and cuts one image.

        `image_HWC`: `[H, W, 3]` uint8. The resize is bicubic with antialiasing, in float32 on 0..255, and keeps values
        beyond that range. Returns new memory, patches in `dtype`. `watch` times the stages. `keep_bytes`: patches of an
        image that needs no resize stay uint8, which takes a quarter to half of the memory, and the tower's `as_floats`
        normalises them to the same values. Raises `ValueError` for another shape or dtype, and like `target_grid`.
        """
        import torch  # imported here: grids and token counts need no torch

        from encoder.preprocess import cut_patches, normalise, resize_pixels

        check_pixels(image_HWC)
        config = self.config
        grid = self.grid(image_HWC.shape[0], image_HWC.shape[1])
        size = (grid[0] * config.patch_size, grid[1] * config.patch_size)
        watch = watch or Stopwatch()
        if keep_bytes and tuple(image_HWC.shape[:2]) == size:
            with watch("patch"):
                patches = cut_patches(image_HWC.permute(2, 0, 1), config.patch_size, torch.uint8)
            return EncoderItem(grid, patches, merge_size=config.merge_size)
        with watch("resize"):
            pixels_CHW = resize_pixels(image_HWC.permute(2, 0, 1)[None], size)[0]
        with watch("patch"):
            scaled_CHW = normalise(pixels_CHW, config.image_mean, config.image_std)
            patches = cut_patches(scaled_CHW, config.patch_size, dtype)
        return EncoderItem(grid, patches, merge_size=config.merge_size)


def target_grid(
    height: int, width: int, *, patch_size: int, min_patches: int, max_patches: int, merge_size: int = 2
) -> Grid:
    """The patch grid `(gh, gw)` that an image of `height` x `width` pixels is resized to.

    The released processor's rule: about one patch per `patch_size` pixels, shrunk to at most `max_patches`, enlarged to
    at least `min_patches`, both sides multiples of `merge_size`. Rounding a side of 1 up to `merge_size` may leave a
    very flat image above `max_patches`, as in the released processor.

    Raises `ValueError` if a size is not positive, or if the image is so flat that the grid would have no rows or no
    columns.
    """
    if height < 1 or width < 1:
        raise ValueError(f"an image needs at least one pixel each way, got {height}x{width}")
    if patch_size < 1 or min_patches < 1 or max_patches < 1:
        numbers = f"patch_size {patch_size}, min_patches {min_patches}, max_patches {max_patches}"
        raise ValueError(f"{numbers}: all must be positive")
    # Python's round (half to even) is part of the rule: 224 / 16 + 0.5 = 14.5 -> 14, but 15.5 -> 16.
    rows = round(height / patch_size + 0.5)
    columns = round(width / patch_size + 0.5)
    shrink = min(math.sqrt(max_patches / (rows * columns)), 1.0)
    rows, columns = math.floor(shrink * rows), math.floor(shrink * columns)
    if rows == 0 or columns == 0:
        raise ValueError(f"an image of {height}x{width} pixels is too flat for a grid of at most {max_patches} patches")
    if max_patches > min_patches and rows * columns < min_patches:
        grow = math.sqrt(min_patches / (rows * columns))
        rows, columns = math.ceil(grow * rows), math.ceil(grow * columns)
    rows = _to_multiple(rows, columns, merge_size, max_patches)
    columns = _to_multiple(columns, rows, merge_size, max_patches)
    return rows, columns


def _to_multiple(side: int, other: int, multiple: int, max_area: int) -> int:
    over = side % multiple
    if not over:
        return side
    up = side + multiple - over
    return up if up * other <= max_area else max(multiple, side - over)
