"""Converts a decoded image to flattened patches: tiles, then the whole image, cut like the released processor.

Shapes: H, W pixels; C = 3 channels; p the patch side; T patches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from encoder.item import EncoderItem, Grid, ItemLayout
from encoder.stopwatch import Stopwatch
from families.frames import check_pixels, check_tokens
from families.nemotron_h_nano_vl.vision_config import TiledConfig
from families.tiles import best_tiles

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TiledImageRule:
    """Implements `families.family.ImageRule` and `CutsSlices` with the settings of `config`. Tiles are the slices of an
    `ItemLayout`. No text is between them, so an image has one placeholder in a prompt."""

    config: TiledConfig
    slices_first = True

    @property
    def most_slices(self) -> int:
        return self.config.max_tiles

    def grid(self, height: int, width: int) -> Grid:
        """The patch grid of a tile, and of the whole image; the same for an image of any size."""
        _check_size(height, width)
        return self.config.tile_side, self.config.tile_side

    def layout(self, height: int, width: int) -> ItemLayout:
        """How an image of `height` x `width` pixels divides into tiles. Raises `ValueError` for an empty image."""
        config, grid = self.config, self.grid(height, width)
        rows, columns = best_tiles(height, width, 1, config.max_tiles, config.tile_size)
        if rows * columns == 1:
            return ItemLayout(grid, merge_size=config.merge_size)
        return ItemLayout(
            grid if config.use_thumbnail else (0, 0), num_sequences=rows * columns + config.use_thumbnail,
            slices=(rows, columns), slice_grid=grid, slices_first=True, merge_size=config.merge_size,
        )  # fmt: skip

    def patchify(
        self, image_HWC: torch.Tensor, dtype: torch.dtype, *, keep_bytes: bool = False, watch: Stopwatch | None = None
    ) -> EncoderItem:
        """Resizes one image to its tiles and to one tile, normalises and cuts both.

        `image_HWC`: `[H, W, 3]` uint8. The resize is bicubic with antialiasing, in float32, and keeps values beyond
        those of bytes. Returns new memory, patches in `dtype`. `keep_bytes`: an image that has the size of a tile
        stays uint8, and the tower's `as_floats` normalises it to the same values. Raises `ValueError` for another
        shape or dtype, and for an image of more tokens than the context has.
        """
        import torch  # imported here: grids and token counts need no torch

        from encoder.preprocess import cut_patches, normalise, resize_pixels

        check_pixels(image_HWC)
        config, watch = self.config, watch or Stopwatch()
        height, width = image_HWC.shape[:2]
        layout = self.layout(height, width)
        check_tokens(layout.tokens, config.max_model_len)
        pixels_CHW = image_HWC.permute(2, 0, 1)
        cuts = [layout.slices] if layout.num_slices else []
        if layout.num_sequences != layout.num_slices:
            cuts.append((1, 1))
        sizes = [(rows * config.tile_size, columns * config.tile_size) for rows, columns in cuts]
        as_bytes = keep_bytes and sizes == [(height, width)]
        parts = []
        for (rows, columns), size in zip(cuts, sizes):
            part_CHW = pixels_CHW
            if not as_bytes:
                with watch("resize"):
                    part_CHW = resize_pixels(pixels_CHW[None], size)[0]
            with watch("patch"):
                if not as_bytes:
                    part_CHW = normalise(part_CHW, config.image_mean, config.image_std)
                kept = torch.uint8 if as_bytes else dtype
                for band_CHW in part_CHW.chunk(rows, 1):
                    parts += [cut_patches(tile, config.patch_size, kept) for tile in band_CHW.chunk(columns, 2)]
        with watch("patch"):
            joined = torch.cat(parts)
        return EncoderItem(
            layout.grid, joined, num_sequences=layout.num_sequences, slices=layout.slices,
            slice_grid=layout.slice_grid, slices_first=layout.slices_first, merge_size=layout.merge_size,
        )  # fmt: skip


def _check_size(height: int, width: int) -> None:
    if height < 1 or width < 1:
        raise ValueError(f"an image needs at least one pixel each way, got {height}x{width}")
