"""Settings of tiles, and the token counts that follow from them. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from encoder.item import num_image_tokens
from families.nemotron_h_omni.vision_config import VisionConfig
from families.tiles import LARGEST_TILE, MOST_TILES


@dataclass(frozen=True)
class TiledConfig(VisionConfig):
    """Sizes of the tower, and the settings of tiles. Those of images without tiles (`min_num_patches` and
    `max_num_patches`) have no effect.

    Raises `ValueError` naming the fields and values of an impossible combination.
    """

    tile_size: int = 512
    """Side of a tile, of the whole image and of a video's frame, in pixels."""
    max_tiles: int = 12
    """Largest number of tiles of an image, without the whole image."""
    use_thumbnail: bool = True
    """Whether an image of several tiles is also encoded as a whole, resized to one tile."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, most in (("tile_size", LARGEST_TILE), ("max_tiles", MOST_TILES)):
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be from 1 to {most}")
        if self.tile_size % self.factor:
            raise ValueError(
                f"force_image_size {self.tile_size} is not a multiple of {self.factor}, the patch_size "
                f"{self.patch_size} divided by the downsample_ratio {1 / self.merge_size:g}"
            )

    @property
    def tile_side(self) -> int:
        """Patches along each side of a tile."""
        return self.tile_size // self.patch_size

    @property
    def tile_tokens(self) -> int:
        """Tokens of a tile."""
        return num_image_tokens((self.tile_side, self.tile_side), merge_size=self.merge_size)

    @property
    def min_image_tokens(self) -> int:
        """Tokens of an image of one tile."""
        return self.tile_tokens

    @property
    def max_image_tokens(self) -> int:
        """Tokens of an image with the most tiles, but not more than the context holds."""
        tiles = self.max_tiles + (self.use_thumbnail and self.max_tiles > 1)
        return max(min(tiles * self.tile_tokens, self.max_model_len), self.tile_tokens)
