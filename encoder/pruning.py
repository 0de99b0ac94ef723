"""EVS video pruning: drop the rows that repeat the frame before, once the tower is done with them.

T temporal patches of N tokens and D features. The row of token n in temporal patch t scores `1 - cos(row[t, n],
row[t - 1, n])`; the first temporal patch always stays. How many rows stay depends on shapes alone, so space is reserved
and graphs are replayed as ever; only which rows they are depends on the images. The rule is transformers'
`compute_retention_mask` (arXiv 2510.14624), scored in float32 whatever the rows' dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from encoder.item import retained_tokens

ALWAYS_KEPT = 255.0
"""Score of the first temporal patch: above 2, the most that a cosine can give."""


def retained_rows(rows_TND: Tensor, rate: float) -> Tensor:
    """Which rows of `[T, N, D]`, counted through, stay: int64 `[retained_tokens(T, N, rate)]`, ascending, on the same
    device. Of equal scores the earlier row stays. No host sync."""
    sequences, tokens, _ = rows_TND.shape
    kept = retained_tokens(sequences, tokens, rate)
    rows_TND = rows_TND.float()
    change_TN = 1 - F.cosine_similarity(rows_TND[1:], rows_TND[:-1], dim=-1)
    scores = torch.cat([change_TN.new_full((1, tokens), ALWAYS_KEPT), change_TN]).flatten()
    return scores.argsort(descending=True, stable=True)[:kept].sort().values


def prune(rows_TND: Tensor, rate: float, out: Tensor) -> tuple[int, ...]:
    """Write the rows that stay, in their order, to `out` `[retained_tokens, D]`.

    Returns how many stayed of each temporal patch; that is the one host sync.
    """
    sequences, tokens, width = rows_TND.shape
    kept = retained_rows(rows_TND, rate)
    torch.index_select(rows_TND.reshape(sequences * tokens, width), 0, kept, out=out)
    return tuple(torch.bincount(kept // tokens, minlength=sequences).tolist())
