"""EVS video pruning: after the tower, drops rows that repeat the previous frame.

T temporal patches of N tokens and D features. The row of token n in temporal patch t scores `1 - cos(row[t, n], row[t -
1, n])`; the first temporal patch is always kept. The number of rows that remain depends on shapes only, so memory can
be reserved in advance; which rows remain depends on their content. The rule is transformers' `compute_retention_mask`
(arXiv 2510.14624), scored in float32 whatever the rows' dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from encoder.item import retained_tokens

ALWAYS_KEPT = 255.0
"""Score of the first temporal patch: above 2, the largest value of `1 - cos`."""


def retained_rows(rows_TND: Tensor, rate: float) -> Tensor:
    """Indices of the rows of `[T, N, D]` that remain: int64 `[retained_tokens(T, N, rate)]`, ascending, same device. If
    scores are equal, the earlier row wins. No host sync."""
    sequences, tokens, _ = rows_TND.shape
    kept = retained_tokens(sequences, tokens, rate)
    rows_TND = rows_TND.float()
    change_TN = 1 - F.cosine_similarity(rows_TND[1:], rows_TND[:-1], dim=-1)
    scores = torch.cat([change_TN.new_full((1, tokens), ALWAYS_KEPT), change_TN]).flatten()
    return scores.argsort(descending=True, stable=True)[:kept].sort().values


def prune(rows_TND: Tensor, rate: float, out: Tensor) -> tuple[int, ...]:
    """Writes the remaining rows in order to `out` `[retained_tokens, D]`.

    Returns the number of rows that remain of each temporal patch, which takes one host sync.
    """
    sequences, tokens, width = rows_TND.shape
    kept = retained_rows(rows_TND, rate)
    torch.index_select(rows_TND.reshape(sequences * tokens, width), 0, kept, out=out)
    return tuple(torch.bincount(kept // tokens, minlength=sequences).tolist())
