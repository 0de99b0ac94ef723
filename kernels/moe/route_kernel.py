"""Choice of experts in Triton: one program per token, from scores that torch has computed.

`T` tokens, `E` experts, `K` chosen experts of a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from kernels.launch import launch


@triton.jit
def _choose(
    p_logits,  # [T, E] float32
    p_correction,  # [E]; without SOFTMAX
    p_experts,  # [T, K] int64
    p_weights,  # [T, K] float32
    scaling,
    E: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORMALISE: tl.constexpr,
    SOFTMAX: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    SIZE: tl.constexpr = E // GROUPS
    NEVER: tl.constexpr = float("-inf")
    o_g = tl.arange(0, BLOCK_G)
    o_s = tl.arange(0, BLOCK_S)
    o_e = o_g[:, None] * SIZE + o_s[None, :]
    m_e = (o_g < GROUPS)[:, None] & (o_s < SIZE)[None, :]
    logits = tl.load(p_logits + i_token * E + o_e, mask=m_e, other=0.0)
    if SOFTMAX:
        scores = logits
        choice = tl.where(m_e, logits, NEVER)
    else:
        scores = 1.0 / (1.0 + tl.exp(-logits))
        choice = tl.where(m_e, scores + tl.load(p_correction + o_e, mask=m_e, other=0.0), NEVER)
    if KEPT < GROUPS:
        best = tl.max(choice, 1)
        if SIZE > 1:
            first = tl.argmax(choice, 1)
            best += tl.max(tl.where(o_s[None, :] == first[:, None], NEVER, choice), 1)
        best = tl.where(o_g < GROUPS, best, NEVER)
        kept = tl.zeros([BLOCK_G], tl.int32)
        for _ in tl.static_range(KEPT):
            taken = tl.argmax(best, 0)
            kept = tl.where(o_g == taken, 1, kept)
            best = tl.where(o_g == taken, NEVER, best)
        choice = tl.where((kept > 0)[:, None], choice, NEVER)
    o_k = tl.arange(0, BLOCK_K)
    experts = tl.zeros([BLOCK_K], tl.int32)
    weights = tl.zeros([BLOCK_K], tl.float32)
    for k in tl.static_range(K):
        top = tl.max(tl.max(choice, 1), 0)
        # The lowest id among equals; a row of NaN (possibly padding) still gets a valid expert.
        taken = tl.min(tl.min(tl.where((choice == top) & m_e, o_e, E - 1), 1), 0)
        weight = tl.sum(tl.sum(tl.where((o_e == taken) & m_e, scores, 0.0), 1), 0)
        experts = tl.where(o_k == k, taken, experts)
        weights = tl.where(o_k == k, weight, weights)
        choice = tl.where(o_e == taken, NEVER, choice)
    if SOFTMAX:
        # Softmax over the chosen, which equals softmax over all divided by the sum of the chosen.
        weights = tl.where(o_k < K, weights, NEVER)
        weights = tl.exp(weights - tl.max(weights, 0))
        weights = weights / tl.sum(weights, 0)
    if NORMALISE:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    tl.store(p_experts + i_token * K + o_k, experts.to(tl.int64), mask=o_k < K)
    tl.store(p_weights + i_token * K + o_k, weights * scaling, mask=o_k < K)


def route(
    x_TD: Tensor,
    gate_ED: Tensor,
    correction_E: Tensor,
    top_k: int,
    groups: int = 1,
    kept_groups: int = 1,
    normalise: bool = True,
    scaling: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Like the reference; the lowest id wins among equals. The product is torch's, in float32."""
    return _route(x_TD, gate_ED, correction_E, top_k, groups, kept_groups, normalise, scaling)


def route_softmax(x_TD: Tensor, gate_ED: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Like the reference; the lowest id wins among equals. The product is torch's, in float32."""
    return _route(x_TD, gate_ED, None, top_k, 1, 1, False, 1.0)


def _route(
    x_TD: Tensor,
    gate_ED: Tensor,
    correction_E: Tensor | None,
    top_k: int,
    groups: int,
    kept_groups: int,
    normalise: bool,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """`correction` None: softmax."""
    tokens, experts = x_TD.shape[0], gate_ED.shape[0]
    logits = F.linear(x_TD.float(), gate_ED)
    ids = torch.empty(tokens, top_k, dtype=torch.int64, device=x_TD.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=x_TD.device)
    launch(
        _choose,
        (tokens,),
        p_logits=logits,
        p_correction=logits if correction_E is None else correction_E,
        p_experts=ids,
        p_weights=weights,
        scaling=scaling,
        E=experts,
        K=top_k,
        GROUPS=groups,
        KEPT=kept_groups,
        BLOCK_G=triton.next_power_of_2(groups),
        BLOCK_S=triton.next_power_of_2(experts // groups),
        BLOCK_K=triton.next_power_of_2(top_k),
        NORMALISE=normalise,
        SOFTMAX=correction_E is None,
        num_warps=1,
    )
    return ids, weights
