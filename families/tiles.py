"""Rules that several released image processors have: Qwen's for the size of an image or frame, and InternVL's for the
number of an image's tiles."""

from __future__ import annotations

import math
from functools import lru_cache

from encoder.item import Grid

MOST_TILES = 100
"""Largest number of tiles of an image that is served; all grids of so many tiles are compared."""
LARGEST_TILE = 2**14
"""Largest side of a tile, in pixels, that is served."""


def fit_pixels(
    size: tuple[int, int, int], nearest: tuple[int, int, int], factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Height and width that the frames of a clip, or the one frame of an image, are resized to. `size`: number of
    frames, height and width; `nearest`: the same, as multiples, those of the sides of `factor`.

    The sides of `nearest`, or, if all frames together have too many or too few pixels, multiples near the sides of
    `size` scaled to the limit. A very flat image keeps a side of `factor` and may exceed `max_pixels`.
    """
    _, height, width = size
    _, rows, columns = nearest
    if math.prod(nearest) > max_pixels:
        shrink = math.sqrt(math.prod(size) / max_pixels)
        rows = max(factor, math.floor(height / shrink / factor) * factor)
        columns = max(factor, math.floor(width / shrink / factor) * factor)
    elif math.prod(nearest) < min_pixels:
        grow = math.sqrt(min_pixels / math.prod(size))
        rows = math.ceil(height * grow / factor) * factor
        columns = math.ceil(width * grow / factor) * factor
    return rows, columns


def best_tiles(height: int, width: int, least: int, most: int, tile_size: int) -> Grid:
    """Rows and columns of tiles whose aspect ratio is nearest to the image's; of several, the last one of `_grids` of
    which the image has more than half of the pixels."""
    aspect, area = width / height, width * height
    best, error = (1, 1), math.inf
    for columns, rows in _grids(least, most):
        found = abs(aspect - columns / rows)
        if found < error or (found == error and area > 0.5 * tile_size * tile_size * columns * rows):
            best, error = (rows, columns), found
    return best


@lru_cache(maxsize=16)
def _grids(least: int, most: int) -> list[tuple[int, int]]:
    """All (columns, rows) of `least` to `most` tiles, by their number. The order of those with the same number is that
    of a set that is filled in the order of the released processors' loops, and decides between equal errors."""
    found = [
        (columns, rows)
        for count in range(least, most + 1)
        for columns in range(1, count + 1)
        for rows in range(1, count + 1)
        if least <= columns * rows <= most
    ]
    return sorted(set(found), key=lambda grid: grid[0] * grid[1])
