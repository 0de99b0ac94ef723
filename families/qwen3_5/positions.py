"""Positions of prompts with images and clips: M-RoPE's three axes, time, height and width (`get_rope_index`)."""

from __future__ import annotations

from collections.abc import Sequence

from decoder.positions import Positions
from encoder.item import Grid

AXES = 3


def prompt_positions(length: int, blocks: Sequence[tuple[int, Grid]], *, merge_size: int) -> Positions:
    """Positions `[3, length]` of a prompt. `blocks`: the first row and the patch grid of each image and temporal patch,
    ascending. Raises `ValueError` for blocks that overlap or lie outside the prompt.

    A text token has the next position on all axes. The image tokens of a block that begins at position p have
    (p, p + row, p + column), and text continues at p plus the block's longer side, in image tokens.
    """
    import numpy as np  # imported here: a frontend process without images needs none

    found = np.empty((length, AXES), np.int64)
    index = position = 0
    for start, grid in blocks:
        rows, columns = grid[0] // merge_size, grid[1] // merge_size
        if not (index <= start and start + rows * columns <= length and rows * columns > 0):
            raise ValueError(f"{rows}x{columns} image tokens at {start} do not lie in places {index} to {length - 1}")
        found[index:start] = np.arange(position, position + start - index)[:, None]
        position += start - index
        index = start + rows * columns
        block = found[start:index].reshape(rows, columns, AXES)
        block[..., 0] = position
        block[..., 1] = position + np.arange(rows)[:, None]
        block[..., 2] = position + np.arange(columns)
        position += max(rows, columns)
    found[index:] = np.arange(position, position + length - index)[:, None]
    position += length - index
    return Positions(tuple(map(tuple, found.tolist())), position - length)
