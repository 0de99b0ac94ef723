"""Space to depth as one gather, in torch; the order is derived in README.md.

R tower rows of D features, N image tokens, M x M patches in each.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.rms_norm import rms_norm


def pixel_shuffle(x_RD: Tensor, token_rows_NM: Tensor) -> Tensor:
    """A new tensor `[N, M * M * D]`: for each token, the rows `token_rows_NM` (`[N, M * M]` int64), concatenated. No
    host sync."""
    tokens, merged = token_rows_NM.shape
    return x_RD.index_select(0, token_rows_NM.reshape(-1)).view(tokens, merged * x_RD.shape[1])


def shuffle_norm(
    x_RD: Tensor,
    token_rows_NM: Tensor,
    weight_E: Tensor | None,
    eps: float,
    final: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:
    """`pixel_shuffle` followed by norms: `[N, M * M * D]` in x's dtype. No host sync.

    `final`: weight and bias `[D]` and epsilon of a LayerNorm of each tower row; then an RMS norm of the whole token
    with `weight_E` `[M * M * D]` float32, unless that is None.
    """
    # The norms are per row or per token, so gathering the rows of images first gives the same result with less work.
    features_NE = pixel_shuffle(x_RD, token_rows_NM)
    if final is not None:
        weight_D, bias_D, final_eps = final
        width = x_RD.shape[1]
        normed = F.layer_norm(features_NE.view(-1, width), (width,), weight_D, bias_D, final_eps)
        features_NE = normed.view(features_NE.shape)
    return features_NE if weight_E is None else rms_norm(features_NE, weight_E, eps)


def shuffle_order(rows: int, columns: int, merge: int = 2) -> Tensor:
    """`[tokens, merge * merge]` int64: the indices of the patches under each token; tokens row by row, and the patches
    of a token row by row too.

    Raises `ValueError` unless both sides of the grid are multiples of `merge`.
    """
    if rows % merge or columns % merge:
        raise ValueError(f"a grid of {rows}x{columns} patches: both sides must be multiples of merge_size {merge}")
    grid = torch.arange(rows * columns).view(rows // merge, merge, columns // merge, merge)
    return grid.permute(0, 2, 1, 3).reshape(-1, merge * merge)
