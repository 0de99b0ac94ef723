"""Space to depth as one gather, in torch; the order is derived in README.md.

R tower rows of D features, N image tokens, M x M patches in each.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pixel_shuffle(x_RD: Tensor, token_rows_NM: Tensor) -> Tensor:
    """New `[N, M * M * D]`: the rows that `token_rows_NM` `[N, M * M]` int64 names, side by side. No host sync."""
    tokens, merged = token_rows_NM.shape
    return x_RD.index_select(0, token_rows_NM.reshape(-1)).view(tokens, merged * x_RD.shape[1])


def shuffle_order(rows: int, columns: int, merge: int = 2) -> Tensor:
    """`[tokens, merge * merge]` int64: for each token, row-major, the patches under it, row-major too.

    Raises `ValueError` if the grid is not a multiple of `merge` each way.
    """
    if rows % merge or columns % merge:
        raise ValueError(f"a grid of {rows}x{columns} patches is not made of {merge}x{merge} tokens")
    grid = torch.arange(rows * columns).view(rows // merge, merge, columns // merge, merge)
    return grid.permute(0, 2, 1, 3).reshape(-1, merge * merge)
