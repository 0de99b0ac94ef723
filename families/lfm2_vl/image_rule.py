"""Converts a decoded image to flattened patches: tiles of a large image, then the whole image, cut like the released
processor.

Shapes: H, W pixels; C = 3 channels; p the patch side; T patches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from encoder.item import EncoderItem, Grid, ItemLayout
from encoder.media_limits import RGB
from encoder.stopwatch import Stopwatch
from families.frames import check_pixels, check_tokens
from families.lfm2_vl.vision_config import VisionConfig

if TYPE_CHECKING:
    import torch

START, END, THUMBNAIL = "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"


@dataclass(frozen=True)
class TiledImageRule:
    """Implements `families.family.ImageRule` and `SlicingRule` with the settings of `config`. Tiles are the slices of
    an `ItemLayout`."""

    config: VisionConfig
    slices_first = True

    @property
    def most_slices(self) -> int:
        return self.config.image.most_tiles

    def grid(self, height: int, width: int) -> Grid:
        """The patch grid of the whole image (without tiles) for an image of `height` x `width` pixels."""
        sides = self.config.image.whole_size(height, width, self.config.factor)
        return sides[0] // self.config.patch_size, sides[1] // self.config.patch_size

    def patchify(
        self, image_HWC: torch.Tensor, dtype: torch.dtype, *, keep_bytes: bool = False, watch: Stopwatch | None = None
    ) -> EncoderItem:
        """Resizes and cuts one image and its tiles, and normalises the patches. With `keep_bytes` they stay uint8, and
        the tower's `as_floats` normalises them to the same values.

        `image_HWC`: `[H, W, 3]` uint8, resized with torch's bilinear filter on bytes. Returns new memory. Raises
        `ValueError` for another shape or dtype, and for an image of more tokens than the context has.
        """
        import torch  # imported here: grids and token counts need no torch

        from encoder.preprocess import resize_uint8

        check_pixels(image_HWC)
        watch = watch or Stopwatch()
        layout = self.layout(image_HWC.shape[0], image_HWC.shape[1])
        check_tokens(layout.tokens, self.config.max_model_len)
        patches = []
        for cut, grid in ((layout.slices, layout.slice_grid), ((1, 1), layout.grid)):
            if grid == (0, 0):
                continue
            with watch("resize"):
                resized_HWC = resize_uint8(image_HWC, self._pixels(cut, grid), mode="bilinear")
            with watch("patch"):
                patches.append(cut_parts(resized_HWC, cut, self.config.patch_size))
        with watch("patch"):
            joined = torch.cat(patches)
            if not keep_bytes:
                joined = normalised(joined, self.config.image.mean, self.config.image.std).to(dtype)
        return EncoderItem(
            layout.grid, joined, num_sequences=layout.num_sequences, slices=layout.slices,
            slice_grid=layout.slice_grid, slices_first=layout.slices_first, merge_size=layout.merge_size,
        )  # fmt: skip

    def layout(self, height: int, width: int) -> ItemLayout:
        """How an image of `height` x `width` pixels divides into tiles and patches."""
        config = self.config
        grid, tiles = self.grid(height, width), config.image.tiles(height, width, config.patch_size, config.factor)
        if tiles == (0, 0):
            return ItemLayout(grid, merge_size=config.merge_size)
        side = config.image.tile_size // config.patch_size
        whole = config.image.use_thumbnail
        return ItemLayout(
            grid if whole else (0, 0), num_sequences=tiles[0] * tiles[1] + whole, slices=tiles,
            slice_grid=(side, side), slices_first=True, merge_size=config.merge_size,
        )  # fmt: skip

    def _pixels(self, cut: Grid, grid: Grid) -> tuple[int, int]:
        """Height and width of an image of `cut` tiles with `grid` patches each."""
        patch = self.config.patch_size
        return cut[0] * grid[0] * patch, cut[1] * grid[1] * patch

    def text(self, item: ItemLayout, number: int, *, token: str) -> str:
        """The image's part of the prompt: its tiles row by row, each with its place, then the whole image."""
        if not self.config.use_image_special_tokens:
            return token * item.num_sequences
        rows, columns = item.slices
        tiles = [f"<|img_row_{row + 1}_col_{column + 1}|>" for row in range(rows) for column in range(columns)]
        whole = [] if item.num_sequences == len(tiles) else [THUMBNAIL if tiles else ""]
        return START + "".join(name + token for name in tiles + whole) + END


def cut_parts(pixels_HWC: torch.Tensor, cut: Grid, patch_size: int) -> torch.Tensor:
    """`[T, p * p * 3]` uint8 in new memory: part after part of `cut` rows and columns of parts, each row by row; pixels
    are row by row inside a patch, channels innermost."""
    height, width, channels = pixels_HWC.shape
    rows, columns = height // cut[0] // patch_size, width // cut[1] // patch_size
    parts = pixels_HWC.reshape(cut[0], rows, patch_size, cut[1], columns, patch_size * channels)
    return parts.permute(0, 3, 1, 4, 2, 5).reshape(-1, channels * patch_size**2)


def normalised(patches_TP: torch.Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> torch.Tensor:
    """Normalises uint8 patches `[T, n * 3]`, channels innermost, to float32 on their device, rounding like the released
    processor; new memory."""
    import torch

    mean_C, std_C = (torch.tensor(values, device=patches_TP.device) * 255.0 for values in (mean, std))
    pixels_C = patches_TP.view(-1, RGB).to(torch.float32)
    return pixels_C.sub_(mean_C).div_(std_C).view(patches_TP.shape)
