"""Mixture of experts: routers and experts; the maths is in README.md.

`T` tokens, `E` experts, `K` chosen experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def route(
    x_TD: Tensor,
    gate_ED: Tensor,
    correction_E: Tensor,
    top_k: int,
    groups: int = 1,
    kept_groups: int = 1,
    normalise: bool = True,
    scaling: float = 1.0,
    epsilon: float = 1e-20,
) -> tuple[Tensor, Tensor]:
    """The chosen experts `[T, K]` int64 and their weights `[T, K]` float32, from sigmoid scores.

    x: `[T, D]`; gate: `[E, D]` and correction: `[E]`, float32. The correction is added for the choice only, not to the
    weights. With fewer `kept_groups` than `groups`, experts are chosen only from the groups with the largest sums of
    their two best experts' scores. `normalise`: the weights of a token are divided by their sum plus `epsilon`;
    then they are multiplied by `scaling`.
    """
    scores = torch.sigmoid(F.linear(x_TD.float(), gate_ED))
    choice = scores + correction_E
    if kept_groups < groups:
        grouped = choice.view(x_TD.shape[0], groups, -1)
        best = grouped.topk(min(2, grouped.shape[-1]), dim=-1)[0].sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(kept_groups, dim=-1)[1], True)
        choice = grouped.masked_fill(~kept[:, :, None], float("-inf")).view_as(choice)
    experts = choice.topk(top_k, dim=-1)[1]
    weights = scores.gather(1, experts)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + epsilon)
    return experts, weights * scaling


def route_softmax(x_TD: Tensor, gate_ED: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Experts with the largest scores `[T, K]` int64, and the softmax over their scores `[T, K]` float32."""
    scores, experts = F.linear(x_TD.float(), gate_ED).topk(top_k, dim=-1)
    return experts, scores.softmax(-1)


def run_experts(
    x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, experts: Sequence[Callable[[Tensor], Tensor]]
) -> Tensor:
    """Sum over each token's experts of weight * expert(token), `[T, D]` in x's dtype, accumulated in float32.

    `experts[e]` maps `[rows, D]` to `[rows, D]`; it is called once with all rows that chose it, or not at all.
    """
    out = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
    order = experts_TK.reshape(-1).argsort(stable=True)
    tokens = torch.div(order, experts_TK.shape[1], rounding_mode="floor")
    weights = weights_TK.reshape(-1)[order]
    counts = torch.bincount(experts_TK.reshape(-1), minlength=len(experts)).tolist()
    begin = 0
    for expert, count in enumerate(counts):
        if count:
            rows = tokens[begin : begin + count]
            y = experts[expert](x_TD.index_select(0, rows))
            out.index_add_(0, rows, y.float().mul_(weights[begin : begin + count, None]))
            begin += count
    return out.to(x_TD.dtype)
