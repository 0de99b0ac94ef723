"""Sizes of an image and of its tiles, computed like the released processor does. Heights and widths are in pixels."""

from __future__ import annotations

import math
from dataclasses import dataclass

from encoder.item import Grid
from encoder.media_limits import RGB
from families.tiles import LARGEST_TILE, MOST_TILES, best_tiles, fit_pixels


@dataclass(frozen=True)
class Tiling:
    """Settings of the image processor. Raises `ValueError` naming a field with an impossible value."""

    min_image_tokens: int = 64
    max_image_tokens: int = 256
    """Limits on the tokens of the whole image, which is resized to that."""
    tile_size: int = 512
    """Side of a tile."""
    min_tiles: int = 2
    max_tiles: int = 10
    """Limits on the number of tiles of an image that is split."""
    splits: bool = True
    """Whether large images are split into tiles (`do_image_splitting`)."""
    use_thumbnail: bool = True
    """Whether an image that is split is also encoded as a whole."""
    max_pixels_tolerance: float = 2.0
    """An image is split if it has more pixels than this many times those of `max_image_tokens`."""
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    """`mean` and standard deviation per channel, of pixels scaled to 0..1."""

    def __post_init__(self) -> None:
        for low, high in (("min_image_tokens", "max_image_tokens"), ("min_tiles", "max_tiles")):
            least, most = getattr(self, low), getattr(self, high)
            if not 0 < least <= most:
                raise ValueError(f"{low} {least} must be at least 1 and at most {high} {most}")
        if self.max_tiles > MOST_TILES:
            raise ValueError(f"max_tiles is {self.max_tiles}; at most {MOST_TILES} is served")
        if self.splits and self.min_tiles == 1 < self.max_tiles:
            # The released processor cuts such an image to one tile, but counts the tokens of the whole image.
            raise ValueError(f"min_tiles is 1 and max_tiles {self.max_tiles}; a min_tiles of 2 would work")
        if not 0 < self.tile_size <= LARGEST_TILE:
            raise ValueError(f"tile_size must be from 1 to {LARGEST_TILE}, got {self.tile_size}")
        if not 0 < self.max_pixels_tolerance < math.inf:
            raise ValueError(f"max_pixels_tolerance must be a number above 0, got {self.max_pixels_tolerance}")
        if len(self.mean) != RGB or len(self.std) != RGB or min(self.std) <= 0:
            raise ValueError(f"image_mean {self.mean} and image_std {self.std} need {RGB} numbers, image_std above 0")

    @property
    def most_tiles(self) -> int:
        """Largest number of tiles; 0 if images are not split."""
        return self.max_tiles if self.splits and self.max_tiles > 1 else 0

    def whole_size(self, height: int, width: int, factor: int) -> tuple[int, int]:
        """Height and width that the whole image is resized to: multiples of `factor`, the side of an image token, near
        its aspect ratio. A very flat image may have more than `max_image_tokens`. Raises `ValueError` for an empty
        image."""
        if height < 1 or width < 1:
            raise ValueError(f"an image needs at least one pixel each way, got {height}x{width}")
        least, most = self.min_image_tokens * factor**2, self.max_image_tokens * factor**2
        nearest = 1, max(factor, _nearest(height, factor)), max(factor, _nearest(width, factor))
        return fit_pixels((1, height, width), nearest, factor, least, most)

    def tiles(self, height: int, width: int, patch_size: int, factor: int) -> Grid:
        """Rows and columns of tiles; (0, 0) for an image that is not split. `patch_size`, `factor`: sides of a patch
        and of an image token."""
        rows, columns = (max(patch_size, _nearest(side, factor)) for side in (height, width))
        if not self.most_tiles or rows * columns <= self.max_image_tokens * factor**2 * self.max_pixels_tolerance:
            return 0, 0
        return best_tiles(height, width, self.min_tiles, self.max_tiles, self.tile_size)

    def tile_tokens(self, factor: int) -> int:
        """Tokens of a tile."""
        return (self.tile_size // factor) ** 2

    def least_tokens(self, factor: int) -> int:
        """Lower bound of the tokens of an image; attained unless tiles are so small that an image always has more of
        them than `min_tiles`."""
        # An image of more than `max_image_tokens` is shrunk to that area, and its sides are then rounded down: most is
        # lost if one of them was almost two tokens.
        least = min(self.min_image_tokens, max(self.max_image_tokens // 2, 1))
        alone = self.most_tiles and not self.use_thumbnail
        return min(least, self.min_tiles * self.tile_tokens(factor)) if alone else least

    def most_tokens(self, factor: int) -> int:
        """Tokens of an image with the most tiles. Very flat images may have more."""
        if not self.most_tiles:
            return self.max_image_tokens
        tiles = self.max_tiles * self.tile_tokens(factor)
        return tiles + self.max_image_tokens if self.use_thumbnail else max(tiles, self.max_image_tokens)


def _nearest(length: int, divisor: int) -> int:
    """The multiple of `divisor` nearest to `length`. Rounding half to even is part of the rule."""
    return round(length / divisor) * divisor
