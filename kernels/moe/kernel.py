"""Mixture of experts in Triton: grouped products, and a path for a few tokens; see README.md. `route_kernel` chooses
experts.

`T` tokens, `E` experts, `K` chosen experts of a token, `D` width of a token, `I` of an expert, `X` = T x K pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.fence_kernel import fence, needs_fences
from kernels.launch import by_architecture, launch
from kernels.linear.quantised import Quantised
from kernels.moe.activation_kernel import activated
from kernels.moe.experts import Experts
from kernels.moe.pairs_kernel import block_pairs
from kernels.moe.quantised_kernel import Grouping, grouped_quantised
from kernels.moe.route_kernel import route, route_softmax

__all__ = ["route", "route_softmax", "run_experts"]


@dataclass(frozen=True)
class Tile:
    """One configuration: pairs, outputs and inputs of a block, warps, stages of the load pipeline."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


@dataclass(frozen=True)
class FewTiles:
    """Configuration of the path for a few tokens."""

    up: Tile
    down: Tile
    split: bool
    """Whether each pair's down product is a program of its own, and a third launch adds a token's pairs: one token then
    has `K` times as many programs, which a GPU needs to read at full speed."""


FEW_TOKENS = 8
"""Up to this many tokens each pair reads its expert's weights separately: fewer launches, and experts are rarely
shared."""
_FEW = FewTiles(Tile(1, 16, 256, 8, 2), Tile(1, 16, 256, 8, 2), split=False)
_FEW_SPLIT = FewTiles(Tile(1, 8, 512, 4, 2), Tile(1, 8, 512, 4, 2), split=True)
FEW = {"sm_80": _FEW, "sm_90": _FEW_SPLIT, "sm_100": _FEW_SPLIT, "gfx942": _FEW}

Tiles = tuple[tuple[int, Tile], ...]
"""Tiles by the average number of pairs per expert: (pairs above which a tile is used, tile), in ascending order."""
_TWO_SM_90: Tiles = ((0, Tile(16, 64, 128, 4, 3)), (16, Tile(128, 128, 64, 8, 3)))
_SM_80: Tiles = ((0, Tile(16, 64, 64, 4, 3)), (16, Tile(64, 128, 32, 4, 3)))
_GFX942: Tiles = ((0, Tile(16, 64, 64, 4, 2)), (16, Tile(64, 64, 32, 4, 2)))
TILES: dict[str, Tiles] = {
    "sm_80": _SM_80,
    # With 128 x 128 an H200 reached 37 % of the matmul rate; by estimate the L2 cache limits it to about half. A tile
    # of 128 x 256 reads 3/4 of the bytes per operation. With up to 64 pairs, half of a tile of 128 would be padding.
    "sm_90": (
        (0, Tile(16, 64, 128, 4, 3)), (16, Tile(64, 128, 64, 4, 4)), (64, Tile(128, 128, 64, 8, 3)),
        (96, Tile(128, 256, 64, 8, 3)),
    ),
    "sm_100": _TWO_SM_90,
    "gfx942": _GFX942,
}  # fmt: skip
TILES_GATED: dict[str, Tiles] = {
    "sm_80": ((0, Tile(16, 64, 64, 4, 3)), (16, Tile(64, 128, 32, 8, 3))),  # with 4 warps, its registers spill
    # Two weights and two sums per tile: 128 x 128 already has the traffic of 128 x 256.
    "sm_90": ((0, Tile(16, 64, 128, 4, 3)), (16, Tile(64, 64, 64, 4, 4)), (64, Tile(128, 128, 64, 8, 3))),
    "sm_100": _TWO_SM_90,
    "gfx942": _GFX942,
}
"""For products with a gate."""
TILES_FLOAT32: Tiles = ((0, Tile(16, 32, 32, 4, 2)), (16, Tile(32, 32, 32, 4, 2)))


def tile_of(tiles: Tiles, pairs: int, experts: int) -> Tile:
    """The tile for `pairs` pairs of `experts` experts."""
    return [tile for least, tile in tiles if least == 0 or pairs > least * experts][-1]


@triton.jit
def _few_up(  # type: ignore[no-untyped-def]
    p_x,  # [T, D]
    p_up,  # [E, I, D]
    p_gate,  # [E, I, D]; with GATED
    p_experts,  # [X]
    p_hidden,  # [X, I]
    K: tl.constexpr,
    D: tl.constexpr,
    I: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
):
    i_pair = tl.program_id(0).to(tl.int64)
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    m_n = o_n < I
    o_w = tl.load(p_experts + i_pair).to(tl.int64) * I * D + o_n.to(tl.int64)[:, None] * D
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    if GATED:
        acc_gate = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    # Without `tl.range`, loops without a product are not pipelined.
    for k in tl.range(0, D, BLOCK_K, num_stages=STAGES):
        m_k = k + o_k < D
        x = tl.load(p_x + (i_pair // K) * D + k + o_k, mask=m_k, other=0.0).to(tl.float32)
        o_wk = o_w + (k + o_k)[None, :]
        m_w = m_n[:, None] & m_k[None, :]
        acc += tl.load(p_up + o_wk, mask=m_w, other=0.0).to(tl.float32) * x[None, :]
        if GATED:
            acc_gate += tl.load(p_gate + o_wk, mask=m_w, other=0.0).to(tl.float32) * x[None, :]
    hidden = tl.sum(acc, 1)
    if GATED:
        hidden = hidden * activated(tl.sum(acc_gate, 1), ACT)
    else:
        hidden = activated(hidden, ACT)
    tl.store(p_hidden + i_pair * I + o_n, hidden.to(p_hidden.dtype.element_ty), mask=m_n)


@triton.jit
def _few_down(  # type: ignore[no-untyped-def]
    p_hidden,  # [X, I]
    p_down,  # [E, D, I]
    p_experts,  # [X]
    p_weights,  # [X] float32
    p_out,  # [T, D]
    K: tl.constexpr,  # 1: each pair is a token of its own
    D: tl.constexpr,
    I: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    m_n = o_n < D
    out = tl.zeros([BLOCK_N], tl.float32)
    for j in range(K):
        pair = i_token * K + j
        p_w = p_down + tl.load(p_experts + pair).to(tl.int64) * I * D + o_n.to(tl.int64)[:, None] * I
        acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for k in tl.range(0, I, BLOCK_K, num_stages=STAGES):
            m_k = k + o_k < I
            h = tl.load(p_hidden + pair * I + k + o_k, mask=m_k, other=0.0).to(tl.float32)
            w = tl.load(p_w + (k + o_k)[None, :], mask=m_n[:, None] & m_k[None, :], other=0.0).to(tl.float32)
            acc += w * h[None, :]
        out += tl.sum(acc, 1) * tl.load(p_weights + pair)
    tl.store(p_out + i_token * D + o_n, out.to(p_out.dtype.element_ty), mask=m_n)


@triton.jit
def _grouped(  # type: ignore[no-untyped-def]
    p_in,  # [T or X, IN]
    p_weight,  # [E, OUT, IN]
    p_gate,  # [E, OUT, IN]; with GATED
    p_order,  # [X]: pairs by expert
    p_starts,  # [E + 1]: where each expert's pairs begin in that order
    p_scales,  # [X] float32: weight of each pair
    p_out,  # [X, OUT]
    experts,
    K: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UP: tl.constexpr,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    FENCES: tl.constexpr,
):
    # Blocks of outputs are neighbours in the grid, so that the rows that they share stay in the cache.
    i_expert, begin, count, first = block_pairs(p_starts, experts, BLOCK_M, BLOCK_E)
    if first >= count:
        return
    o_m = first + tl.arange(0, BLOCK_M)
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    m_m = o_m < count
    # Masks that are true everywhere are left out: they cost registers and instructions.
    m_n = o_n < OUT if OUT % BLOCK_N != 0 else tl.full([BLOCK_N], True, tl.int1)
    pair = tl.load(p_order + begin + o_m, mask=m_m, other=0).to(tl.int64)
    p_x = p_in + ((pair // K) * IN if UP else pair * IN)[:, None]
    # Offsets within an expert fit 32 bits.
    p_weight += i_expert.to(tl.int64) * OUT * IN
    p_gate += i_expert.to(tl.int64) * OUT * IN
    o_w = tl.minimum(o_n, OUT - 1)[None, :] * IN  # beyond the last output it is read again, which needs no mask
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if GATED:
        acc_gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    fence(FENCES)  # `block_pairs` exchanges numbers through shared memory
    for k in range(0, IN, BLOCK_K):
        m_k = k + o_k < IN if IN % BLOCK_K != 0 else tl.full([BLOCK_K], True, tl.int1)
        m_x, m_w = m_m[:, None] & m_k[None, :], m_k[:, None]
        x = tl.load(p_x + (k + o_k)[None, :], mask=m_x, other=0.0)
        o_wk = o_w + (k + o_k)[:, None]
        acc = tl.dot(x, tl.load(p_weight + o_wk, mask=m_w, other=0.0), acc, input_precision="ieee")
        if GATED:
            acc_gate = tl.dot(x, tl.load(p_gate + o_wk, mask=m_w, other=0.0), acc_gate, input_precision="ieee")
    # Read again, so that the loop does not keep it in registers.
    pair = tl.load(p_order + begin + o_m, mask=m_m, other=0, volatile=True).to(tl.int64)
    if GATED:
        acc = acc * activated(acc_gate, ACT)
    elif UP:
        acc = activated(acc, ACT)
    else:
        acc = acc * tl.load(p_scales + pair, mask=m_m, other=0.0)[:, None]
    m_out = m_m[:, None] & m_n[None, :]
    tl.store(p_out + (pair * OUT)[:, None] + o_n[None, :], acc.to(p_out.dtype.element_ty), mask=m_out)


@triton.jit
def _sum_pairs(  # type: ignore[no-untyped-def]
    p_pairs,  # [X, D] float32
    p_out,  # [T, D]
    K: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_d = o_d < D
    out = tl.zeros([BLOCK], tl.float32)
    for k in range(K):
        out += tl.load(p_pairs + (i_token * K + k) * D + o_d, mask=m_d, other=0.0)
    tl.store(p_out + i_token * D + o_d, out.to(p_out.dtype.element_ty), mask=m_d)


def run_experts(x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, experts: Experts) -> Tensor:
    """Like the reference, for stacked experts. No host sync: which experts have work is read on the device."""
    x_TD = x_TD.contiguous()
    if x_TD.shape[0] <= FEW_TOKENS and experts.plain:
        return _run_few(x_TD, experts_TK, weights_TK, experts)
    return _run_many(x_TD, experts_TK, weights_TK, experts)


def _run_few(x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, experts: Experts) -> Tensor:
    """Processes pairs separately: two or three launches; weights are read once per pair, from the cache if pairs share
    them."""
    (tokens, width), chosen, inner = x_TD.shape, experts_TK.shape[1], experts.inner
    few = by_architecture(FEW, x_TD.device)
    split = few.split and chosen > 1
    out = torch.empty_like(x_TD)
    summed = out
    if split:
        summed = torch.empty(tokens * chosen, width, dtype=torch.float32, device=x_TD.device)
    hidden = torch.empty(tokens * chosen, inner, dtype=x_TD.dtype, device=x_TD.device)
    sizes = {"D": width, "I": inner}
    up, gate, down = experts.up_EID, experts.gate_EID, experts.down_EDI
    launch(
        _few_up,
        (tokens * chosen, triton.cdiv(inner, few.up.n)),
        p_x=x_TD,
        p_up=up,
        p_gate=up if gate is None else gate,
        p_experts=experts_TK,
        p_hidden=hidden,
        ACT=experts.activation,
        GATED=gate is not None,
        K=chosen,
        **sizes,
        **_options(few.up),
    )
    launch(
        _few_down,
        (summed.shape[0], triton.cdiv(width, few.down.n)),
        p_hidden=hidden,
        p_down=down,
        p_experts=experts_TK,
        p_weights=weights_TK,
        p_out=summed,
        K=1 if split else chosen,
        **sizes,
        **_options(few.down),
    )
    if split:
        _add_pairs(summed, out, chosen)
    return out


def _options(tile: Tile) -> dict[str, int]:
    """Arguments of the kernels for a few tokens."""
    return {"BLOCK_N": tile.n, "BLOCK_K": tile.k, "STAGES": tile.stages, "num_warps": tile.warps}


def _run_many(x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, experts: Experts) -> Tensor:
    """Sorts pairs by expert, computes grouped products, and sums each token's pairs in a fixed order."""
    (tokens, width), chosen, inner = x_TD.shape, experts_TK.shape[1], experts.inner
    pairs, count = tokens * chosen, len(experts)
    by_expert, order = experts_TK.reshape(-1).sort(stable=True)
    starts = torch.searchsorted(by_expert, torch.arange(count + 1, device=x_TD.device))
    grouping = Grouping(order, starts, weights_TK)
    hidden = torch.empty(pairs, inner, dtype=x_TD.dtype, device=x_TD.device)
    weighted = torch.empty(pairs, width, dtype=torch.float32, device=x_TD.device)
    up, gate, down = experts.up_EID, experts.gate_EID, experts.down_EDI
    if isinstance(up, Quantised):
        gates = None
        if gate is not None:
            assert isinstance(gate, Quantised)
            gates = torch.empty(pairs, inner, dtype=torch.float32, device=x_TD.device)
            grouped_quantised(x_TD, gate, grouping, gates, up=True)
        grouped_quantised(x_TD, up, grouping, hidden, up=True, activation=experts.activation, gate=gates)
    else:
        assert not isinstance(gate, Quantised)
        _product(x_TD, up, gate, grouping, hidden, up=True, activation=experts.activation)
    if isinstance(down, Quantised):
        grouped_quantised(hidden, down, grouping, weighted, up=False)
    else:
        _product(hidden, down, None, grouping, weighted, up=False, activation=experts.activation)
    out = torch.empty_like(x_TD)
    _add_pairs(weighted, out, chosen)
    return out


def _add_pairs(pairs_XD: Tensor, out_TD: Tensor, chosen: int) -> None:
    """Writes the sums of each token's pairs, which are added in the order of its choices."""
    tokens, width = out_TD.shape
    launch(
        _sum_pairs,
        (tokens, triton.cdiv(width, 1024)),
        p_pairs=pairs_XD,
        p_out=out_TD,
        K=chosen,
        D=width,
        BLOCK=1024,
        num_warps=4,
    )


def _product(
    given: Tensor, weight: Tensor, gate: Tensor | None, grouping: Grouping, result: Tensor, *, up: bool, activation: str
) -> None:  # fmt: skip
    """A grouped product with plain weights."""
    pairs, count = result.shape[0], grouping.experts
    assert given.shape[1] * result.shape[1] < 2**31
    table = by_architecture(TILES if gate is None else TILES_GATED, given.device)
    tile = tile_of(TILES_FLOAT32 if given.dtype == torch.float32 else table, pairs, count)
    launch(
        _grouped,
        (triton.cdiv(result.shape[1], tile.n), pairs // tile.m + count),
        p_in=given,
        p_weight=weight,
        p_gate=weight if gate is None else gate,
        p_order=grouping.order,
        p_starts=grouping.starts,
        p_scales=grouping.shares,
        p_out=result,
        experts=count,
        K=grouping.chosen,
        IN=given.shape[1],
        OUT=result.shape[1],
        BLOCK_E=triton.next_power_of_2(count),
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        UP=up,
        ACT=activation,
        GATED=gate is not None,
        FENCES=needs_fences(given.dtype, given.device),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
