"""Converts a decoded image to flattened patches: the whole image and slices of large ones, cut like the released
processor.

Shapes: H, W pixels; C = 3 channels; p the patch side; T patches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from encoder.item import EncoderItem, Grid, ItemLayout
from encoder.media_limits import RGB
from encoder.stopwatch import Stopwatch
from families.minicpmv4_6.vision_config import VisionConfig
from families.qwen3_5.image_rule import normalised, resize_bytes

if TYPE_CHECKING:
    import torch

Size = tuple[int, int]
"""Height and width, in pixels."""


@dataclass(frozen=True)
class SlicedImageRule:
    """Implements `families.family.ImageRule` and `SlicingRule` with the settings of `config`."""

    config: VisionConfig

    def grid(self, height: int, width: int) -> Grid:
        """The patch grid of the whole image (without slices) for an image of `height` x `width` pixels."""
        sides = self.whole(height, width)
        return sides[0] // self.config.patch_size, sides[1] // self.config.patch_size

    def slices(self, height: int, width: int) -> Grid:
        """Rows and columns of slices of an image of `height` x `width` pixels; (0, 0) if it is not sliced."""
        config = self.config
        if not config.slice_mode:
            return 0, 0
        return best_slices(height, width, config.max_slice_nums, config.scale_resolution) or (0, 0)

    def whole(self, height: int, width: int) -> Size:
        """Height and width that the whole image is resized to. An image that is not sliced may be enlarged."""
        return self._resized(height, width, may_grow=self.slices(height, width) == (0, 0))

    def slice_size(self, height: int, width: int) -> Size:
        """Height and width that each slice of a sliced image is resized to."""
        rows, columns = self.slices(height, width)
        return self._resized(_to_multiple(height, rows) / rows, _to_multiple(width, columns) / columns, may_grow=True)

    def _resized(self, height: float, width: float, *, may_grow: bool) -> Size:
        resolution = self.config.scale_resolution
        if height < 1 or width < 1:
            raise ValueError(f"an image needs at least one pixel each way, got {height:g}x{width:g}")
        if height * width > resolution**2 or may_grow:
            aspect = width / height
            height = int(resolution / math.sqrt(aspect))
            width = int(height * aspect)
        factor = self.config.factor
        return _to_multiple(height, factor), _to_multiple(width, factor)

    def patchify(
        self, image_HWC: torch.Tensor, dtype: torch.dtype, *, keep_bytes: bool = False, watch: Stopwatch | None = None
    ) -> EncoderItem:
        """Resizes and cuts one image and its slices, and normalises the patches. With `keep_bytes` they stay uint8, and
        the tower's `as_floats` normalises them to the same values.

        `image_HWC`: `[H, W, 3]` uint8, resized with Pillow's bicubic filter on bytes. Returns new memory. Raises
        `ValueError` for another shape or dtype, and for an image of more tokens than the context has.
        """
        import torch  # imported here: grids and token counts need no torch

        from encoder.preprocess import cut_patches

        if image_HWC.dim() != 3 or image_HWC.shape[2] != RGB or image_HWC.dtype != torch.uint8:
            raise ValueError(f"expected [H, W, 3] uint8 pixels, got {tuple(image_HWC.shape)} {image_HWC.dtype}")
        config, watch = self.config, watch or Stopwatch()
        height, width = image_HWC.shape[0], image_HWC.shape[1]
        slices = rows, columns = self.slices(height, width)
        parts = [(self.whole(height, width), (1, 1))]
        if rows:
            parts.append((self.slice_size(height, width), slices))
        self._check(sum(down * across * size[0] * size[1] for size, (down, across) in parts))
        patches = []
        for size, (down, across) in parts:
            with watch("resize"):
                resized_HWC = resize_bytes(image_HWC, (size[0] * down, size[1] * across))
            with watch("patch"):
                cut = resized_HWC.reshape(down, size[0], across, size[1], RGB).permute(0, 2, 4, 1, 3).flatten(0, 1)
                patches += [cut_patches(part_CHW, config.patch_size, torch.uint8) for part_CHW in cut]
        with watch("patch"):
            joined = torch.cat(patches)
            if not keep_bytes:
                joined = normalised(joined, config.image_mean, config.image_std).to(dtype)
        grids = [(size[0] // config.patch_size, size[1] // config.patch_size) for size, _ in parts]
        return EncoderItem(
            grids[0], joined, num_sequences=1 + rows * columns, slices=slices,
            slice_grid=grids[1] if rows else (0, 0), merge_size=config.merge_size,
        )  # fmt: skip

    def _check(self, pixels: int) -> None:
        """Raises `ValueError`, with both numbers, if `pixels` make more tokens than the context has."""
        tokens = pixels // self.config.factor**2
        limit = self.config.max_model_len
        if limit is not None and tokens > limit:
            raise ValueError(f"it takes {tokens} tokens and the context holds {limit}")

    def text(self, item: ItemLayout, number: int, *, token: str) -> str:
        """The image's part of the prompt: its number, the whole image, and its slices row by row."""
        words = f"<image_id>{number}</image_id>" if self.config.use_image_id else ""
        row = f"<slice>{token}</slice>" * item.slices[1]
        return f"{words}<image>{token}</image>" + "\n".join([row] * item.slices[0])


def best_slices(height: int, width: int, most: int, resolution: int) -> Grid | None:
    """Rows and columns of slices; None for an image that needs no slices.

    n is the image's area divided by `resolution` squared, rounded up, and at most `most`. Of the grids of n - 1, n or
    n + 1 slices, but at most `most`, the result is the one nearest to the image's aspect ratio. Raises `ValueError` for
    an empty image.
    """
    if height < 1 or width < 1:
        raise ValueError(f"an image needs at least one pixel each way, got {height}x{width}")
    wanted = min(math.ceil(width * height / resolution**2), most)
    if wanted <= 1:
        return None
    shape = math.log(width / height)
    best, least = (1, 1), math.inf
    for count in (wanted - 1, wanted, wanted + 1):
        if count == 1 or count > most:
            continue
        for rows in range(1, count + 1):
            if count % rows:
                continue
            error = abs(shape - math.log(count // rows / rows))
            if error < least or (error == least and rows > best[0]):
                best, least = (rows, count // rows), error
    return best


def _to_multiple(length: float, divisor: int) -> int:
    """`length` rounded to the nearest multiple of `divisor`, but at least `divisor`. Rounding half to even is part of
    the rule."""
    return max(round(length / divisor) * divisor, divisor)
