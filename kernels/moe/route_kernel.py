"""Choice of experts in Triton: the router's product, and one program per token that chooses.

`T` tokens, `E` experts, `K` chosen experts of a token, `D` width of a token, `P` parts of PART inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import launch, one_instruction
from kernels.moe.tiles import Tiles, tile_of
from kernels.tiles import Tile

PART = 512
"""Inputs of one sum; a sum over all inputs adds those of its parts in their order. It decides how results are rounded,
so it does not depend on the number of tokens. With parts, one token has enough programs to read the router's weights at
a good rate."""
TILES: Tiles = ((0, Tile(16, 16, 32, 4, 4)), (512, Tile(64, 32, 16, 4, 4)))
"""Each input of a sum is one multiply-add, in the order of inputs, so tiles differ in speed and never in the result.
From 64 outputs on, Triton 3.6 would multiply rows that were 16-bit numbers in TF32 on sm_100."""


@triton.jit(do_not_specialize=["tokens"])
def _score(  # type: ignore[no-untyped-def]
    p_x,  # [T, D]
    p_gate,  # [E, D] float32
    p_parts,  # [P, T, E] float32
    tokens,
    E: tl.constexpr,
    D: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    i_part = tl.program_id(2)
    o_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    o_d = i_part * PART + tl.arange(0, BLOCK_D)
    m_t, m_e = o_t < tokens, o_e < E
    p_x += o_t.to(tl.int64)[None, :] * D
    p_gate += o_e[:, None] * D
    acc = tl.zeros([BLOCK_E, BLOCK_T], tl.float32)
    for k in range(0, PART, BLOCK_D):
        m_d = k + o_d < D
        b_gate = tl.load(p_gate + (k + o_d)[None, :], mask=m_e[:, None] & m_d[None, :], other=0.0)
        b_x = tl.load(p_x + (k + o_d)[:, None], mask=m_d[:, None] & m_t[None, :], other=0.0)
        acc = tl.dot(b_gate, b_x.to(tl.float32), acc, input_precision="ieee")
    o_out = (i_part.to(tl.int64) * tokens + o_t)[None, :] * E + o_e[:, None]
    tl.store(p_parts + o_out, acc, mask=m_e[:, None] & m_t[None, :])


@triton.jit(do_not_specialize=["tokens"])
def _choose(  # type: ignore[no-untyped-def]
    p_parts,  # [P, T, E] float32: sums of the router's product
    p_correction,  # [E]; without SOFTMAX
    p_experts,  # [T, K] int64
    p_weights,  # [T, K] float32
    tokens,
    scaling,
    PARTS: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORMALISE: tl.constexpr,
    EPSILON: tl.constexpr,
    SOFTMAX: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    SIZE: tl.constexpr = E // GROUPS
    NEVER: tl.constexpr = float("-inf")
    o_g = tl.arange(0, BLOCK_G)
    o_s = tl.arange(0, BLOCK_S)
    o_e = o_g[:, None] * SIZE + o_s[None, :]
    m_e = (o_g < GROUPS)[:, None] & (o_s < SIZE)[None, :]
    p_parts += i_token * E
    logits = tl.load(p_parts + o_e, mask=m_e, other=0.0)
    for _ in range(1, PARTS):
        p_parts += tokens.to(tl.int64) * E
        logits += tl.load(p_parts + o_e, mask=m_e, other=0.0)
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
        weights = weights / (tl.sum(weights, 0) + EPSILON)
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
    epsilon: float = 1e-20,
) -> tuple[Tensor, Tensor]:
    """Like the reference; the lowest id wins among equals. The product is computed in float32, in the same order
    for any number of tokens."""
    return _route(x_TD, gate_ED, correction_E, top_k, groups, kept_groups, normalise, scaling, epsilon)


def route_softmax(x_TD: Tensor, gate_ED: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Like the reference; the lowest id wins among equals. The product is computed in float32, in the same order
    for any number of tokens."""
    return _route(x_TD, gate_ED, None, top_k, 1, 1, False, 1.0, 0.0)


def _route(
    x_TD: Tensor,
    gate_ED: Tensor,
    correction_E: Tensor | None,
    top_k: int,
    groups: int,
    kept_groups: int,
    normalise: bool,
    scaling: float,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    """`correction` None: softmax."""
    (tokens, width), experts = x_TD.shape, gate_ED.shape[0]
    parts = torch.empty(triton.cdiv(width, PART), tokens, experts, dtype=torch.float32, device=x_TD.device)
    tile = tile_of(TILES, tokens)
    launch(
        _score,
        (triton.cdiv(tokens, tile.rows), triton.cdiv(experts, tile.outputs), parts.shape[0]),
        p_x=x_TD.contiguous(),
        p_gate=gate_ED.contiguous(),
        p_parts=parts,
        tokens=tokens,
        E=experts,
        D=width,
        PART=PART,
        BLOCK_T=tile.rows,
        BLOCK_E=tile.outputs,
        BLOCK_D=tile.inputs,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **one_instruction(x_TD.device),
    )
    ids = torch.empty(tokens, top_k, dtype=torch.int64, device=x_TD.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=x_TD.device)
    launch(
        _choose,
        (tokens,),
        p_parts=parts,
        p_correction=parts if correction_E is None else correction_E,
        p_experts=ids,
        p_weights=weights,
        tokens=tokens,
        scaling=scaling,
        PARTS=parts.shape[0],
        E=experts,
        K=top_k,
        GROUPS=groups,
        KEPT=kept_groups,
        BLOCK_G=triton.next_power_of_2(groups),
        BLOCK_S=triton.next_power_of_2(experts // groups),
        BLOCK_K=triton.next_power_of_2(top_k),
        NORMALISE=normalise,
        EPSILON=epsilon,
        SOFTMAX=correction_E is None,
        num_warps=1,
    )
    return ids, weights
