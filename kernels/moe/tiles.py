"""Configurations of the products of experts; README.md has the reasons."""

from __future__ import annotations

from kernels.tiles import Tile

Tiles = tuple[tuple[int, Tile], ...]
"""Tiles by the average number of rows (pairs or tokens) per weight: (rows above which a tile is used, tile), in
ascending order from 0."""


def tile_of(tiles: Tiles, rows: int, weights: int = 1) -> Tile:
    """The tile for `rows` rows that are divided among `weights` weights."""
    return [tile for least, tile in tiles if least == 0 or rows > least * weights][-1]
