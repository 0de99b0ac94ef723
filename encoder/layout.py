"""Positions of patches, prefix tokens and image tokens in a packed launch: index arithmetic on the host, cached per
grid.

Sequences are stored one after the other, each as its K prefix rows and then its patches. In a static layout the
remaining rows form one more (padding) sequence, so that every row is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from encoder.budget import GraphShape
from encoder.item import BLOCK_MAJOR, ROW_MAJOR, Grid
from kernels.pixel_shuffle import shuffle_order


@dataclass(frozen=True)
class Layout:
    """Index tensors of one launch, on the host."""

    source_R: Tensor
    """int64: 0..K-1 a prefix token, K the padding row, K + 1 + t patch t."""
    cu_seqlens: Tensor
    """int32, monotone, from 0 to R."""
    token_rows_NM: Tensor
    """int64: tower rows of the patches under each image token; padding tokens refer to the last row."""
    neighbours_RK: Tensor | None
    """int32: tower rows of the patches around each patch, itself included, and -1 where there is none; None if no
    `side` was given."""
    max_seqlen: int
    patches: int
    """Number of real patches; images never read the patch rows after them."""
    tokens: int
    """Number of real image tokens."""


@lru_cache(maxsize=256)
def _shuffle(grid: Grid, merge: int, order: str) -> Tensor:
    """`[tokens, merge * merge]`: the patches under each image token, for a sequence in this order."""
    tokens_NM = shuffle_order(grid[0], grid[1], merge)
    return torch.arange(grid[0] * grid[1]).view(tokens_NM.shape) if order == BLOCK_MAJOR else tokens_NM


@lru_cache(maxsize=64)
def neighbours(grid: Grid, merge: int, order: str, side: int) -> Tensor:
    """`[gh * gw, side * side]` int32: the patches of the square of `side` x `side` around each patch, row by row, for a
    sequence in this order; -1 outside the grid. `side` is odd."""
    rows, columns = grid
    reach = side // 2
    at_HW = torch.full((rows + 2 * reach, columns + 2 * reach), -1, dtype=torch.int32)
    read_T = shuffle_order(rows, columns, merge).flatten() if order == BLOCK_MAJOR else torch.arange(rows * columns)
    place_T = torch.empty_like(read_T)
    place_T[read_T] = torch.arange(rows * columns)
    at_HW[reach : reach + rows, reach : reach + columns] = place_T.view(rows, columns)
    around_HWSS = at_HW.unfold(0, side, 1).unfold(1, side, 1)
    return around_HWSS.reshape(rows * columns, side * side)[read_T]


def layout(
    grids: Sequence[Grid], *, prefix: int, merge: int, shape: GraphShape | None = None, order: str = ROW_MAJOR,
    side: int = 0,
) -> Layout:  # fmt: skip
    """The layout of `grids` in their order, padded to `shape` if given. `order`: of the patches of each sequence;
    `side`: of the square of patches that a convolution reads."""
    assert grids, "a launch needs an image"
    patches = sum(rows * columns for rows, columns in grids)
    tokens = patches // merge**2
    used = patches + prefix * len(grids)
    total = used if shape is None else shape.rows
    sequences = len(grids) if shape is None else shape.sequences
    if shape is not None:
        fits = len(grids) < shape.sequences and tokens <= shape.capacity and used < shape.rows
        assert fits, f"{len(grids)} images, {tokens} tokens, {used} rows do not fit {shape}"
    source_R = torch.full((total,), prefix, dtype=torch.int64)
    token_rows_NM = torch.full((tokens if shape is None else shape.capacity, merge**2), total - 1, dtype=torch.int64)
    cu_seqlens = torch.full((sequences + 1,), used, dtype=torch.int32)
    neighbours_RK = torch.full((total, side * side), -1, dtype=torch.int32) if side else None
    row = patch = token = 0
    cu_seqlens[0] = 0
    for index, grid in enumerate(grids):
        count = grid[0] * grid[1]
        torch.arange(prefix, out=source_R[row : row + prefix])
        first = row + prefix
        torch.arange(prefix + 1 + patch, prefix + 1 + patch + count, out=source_R[first : first + count])
        torch.add(_shuffle(grid, merge, order), first, out=token_rows_NM[token : token + count // merge**2])
        if neighbours_RK is not None:
            around = neighbours(grid, merge, order, side)
            torch.where(around < 0, around, around + first, out=neighbours_RK[first : first + count])
        row, patch, token = first + count, patch + count, token + count // merge**2
        cu_seqlens[index + 1] = row
    cu_seqlens[-1] = total
    longest = total if shape is not None else max(rows * columns for rows, columns in grids) + prefix
    return Layout(source_R, cu_seqlens, token_rows_NM, neighbours_RK, longest, patches, tokens)
