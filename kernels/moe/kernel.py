"""Mixture of experts in Triton: products of pairs with their experts; see README.md. `route_kernel` chooses experts.

`T` tokens, `E` experts, `K` chosen experts of a token, `D` width of a token, `I` of an expert, `X` = T x K pairs.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.fence_kernel import fence, needs_fences
from kernels.launch import by_architecture, launch, one_instruction
from kernels.linear.quantised import Quantised
from kernels.moe.activation_kernel import activated
from kernels.moe.experts import Experts
from kernels.moe.pairs_kernel import block_pairs
from kernels.moe.quantised_kernel import Grouping, grouped_quantised
from kernels.moe.route_kernel import route, route_softmax
from kernels.moe.tiles import Tiles, tile_of
from kernels.tiles import Tile

__all__ = ["route", "route_softmax", "run_experts"]


FEW_TOKENS = 8
"""Up to this many tokens each pair reads its expert's weights separately: experts are rarely shared, and pairs need not
be sorted."""
# In each table the first tile computes at most 16 pairs of an expert, or the only one for a few tokens.
_TWO_SM_90: Tiles = ((0, Tile(16, 64, 128, 4, 3)), (16, Tile(128, 128, 64, 8, 3)))
_GFX942: Tiles = ((0, Tile(16, 64, 64, 4, 2)), (16, Tile(64, 64, 32, 4, 2)))
TILES: dict[str, Tiles] = {
    "sm_80": ((0, Tile(16, 64, 128, 4, 4)), (16, Tile(64, 128, 32, 4, 3))),
    # With 128 x 128 an H200 reached 37 % of the matmul rate; by estimate the L2 cache limits it to about half. A tile
    # of 128 x 256 reads 3/4 of the bytes per operation. With up to 64 pairs, half of a tile of 128 would be padding.
    "sm_90": (
        (0, Tile(16, 64, 128, 4, 4)), (16, Tile(64, 128, 64, 4, 4)), (64, Tile(128, 128, 64, 8, 3)),
        (96, Tile(128, 256, 64, 8, 3)),
    ),
    "sm_100": _TWO_SM_90,
    "gfx942": _GFX942,
}  # fmt: skip
TILES_GATED: dict[str, Tiles] = {
    "sm_80": ((0, Tile(16, 64, 64, 4, 4)), (16, Tile(64, 128, 32, 8, 3))),  # with 4 warps, its registers spill
    # Two weights and two sums per tile: 128 x 128 already has the traffic of 128 x 256.
    "sm_90": ((0, Tile(16, 64, 128, 4, 3)), (16, Tile(64, 64, 64, 4, 4)), (64, Tile(128, 128, 64, 8, 3))),
    "sm_100": _TWO_SM_90,
    "gfx942": _GFX942,
}
"""For products with a gate."""
TILES_FLOAT32: Tiles = ((0, Tile(16, 32, 32, 4, 2)), (16, Tile(32, 32, 32, 4, 2)))


@triton.jit
def _pairs(p_order, o_order, m_m, SEPARATE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Ids of the pairs at these places of the order, which is not sorted with SEPARATE."""
    if SEPARATE:
        return o_order.to(tl.int64)
    return tl.load(p_order + o_order, mask=m_m, other=0, volatile=True).to(tl.int64)


@triton.jit
def _grouped(  # type: ignore[no-untyped-def]
    p_in,  # [T or X, IN]
    p_weight,  # [E, OUT, IN]
    p_gate,  # [E, OUT, IN]; with GATED
    p_experts,  # [X]; with SEPARATE
    p_order,  # [X]: pairs by expert; without SEPARATE
    p_starts,  # [E + 1]: where each expert's pairs begin in that order; without SEPARATE
    p_out,  # [X, OUT]
    experts,
    K: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SEPARATE: tl.constexpr,  # each program computes one pair, the first row of its block
    UP: tl.constexpr,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    FENCES: tl.constexpr,
):
    # Blocks of outputs are neighbours in the grid, so that the rows that they share stay in the cache.
    if SEPARATE:
        begin, first, count = tl.program_id(1), 0, 1
        i_expert = tl.load(p_experts + begin)
    else:
        i_expert, begin, count, first = block_pairs(p_starts, experts, BLOCK_M, BLOCK_E)
        if first >= count:
            return
    o_m = first + tl.arange(0, BLOCK_M)
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    m_m = o_m < count
    # Masks that are true everywhere are left out: they cost registers and instructions.
    m_n = o_n < OUT if OUT % BLOCK_N != 0 else tl.full([BLOCK_N], True, tl.int1)
    pair = _pairs(p_order, begin + o_m, m_m, SEPARATE)
    p_x = p_in + ((pair // K) * IN if UP else pair * IN)[None, :]
    # Offsets within an expert fit 32 bits.
    p_weight += i_expert.to(tl.int64) * OUT * IN
    p_gate += i_expert.to(tl.int64) * OUT * IN
    o_w = tl.minimum(o_n, OUT - 1)[:, None] * IN  # beyond the last output it is read again, which needs no mask
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if GATED:
        acc_gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    fence(FENCES)  # `block_pairs` exchanges numbers through shared memory
    for k in range(0, IN, BLOCK_K):
        m_k = k + o_k < IN if IN % BLOCK_K != 0 else tl.full([BLOCK_K], True, tl.int1)
        m_x, m_w = m_k[:, None] & m_m[None, :], m_k[None, :]
        x = tl.load(p_x + (k + o_k)[:, None], mask=m_x, other=0.0)
        o_wk = o_w + (k + o_k)[None, :]
        acc = tl.dot(tl.load(p_weight + o_wk, mask=m_w, other=0.0), x, acc, input_precision="ieee")
        if GATED:
            acc_gate = tl.dot(tl.load(p_gate + o_wk, mask=m_w, other=0.0), x, acc_gate, input_precision="ieee")
    pair = _pairs(p_order, begin + o_m, m_m, SEPARATE)  # again, so that the loop does not keep it in registers
    if GATED:
        acc = acc * activated(acc_gate, ACT)
    elif UP:
        acc = activated(acc, ACT)
    m_out = m_n[:, None] & m_m[None, :]
    tl.store(p_out + (pair * OUT)[None, :] + o_n[:, None], acc.to(p_out.dtype.element_ty), mask=m_out)


@triton.jit
def _sum_pairs(  # type: ignore[no-untyped-def]
    p_pairs,  # [X, D] float32
    p_weights,  # [X] float32
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
        pair = i_token * K + k
        out += tl.load(p_weights + pair) * tl.load(p_pairs + pair * D + o_d, mask=m_d, other=0.0)
    tl.store(p_out + i_token * D + o_d, out.to(p_out.dtype.element_ty), mask=m_d)


def run_experts(x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, experts: Experts) -> Tensor:
    """Like the reference, for stacked experts. No host sync: which experts have work is read on the device.

    Each pair's products are added over all inputs in their order, by the same instructions whatever the number of
    tokens, and each token's pairs in the order of its choices.
    """
    x_TD = x_TD.contiguous()
    (tokens, width), chosen = x_TD.shape, experts_TK.shape[1]
    grouping = None
    if tokens > FEW_TOKENS or not experts.plain:
        by_expert, order = experts_TK.reshape(-1).sort(stable=True)
        starts = torch.searchsorted(by_expert, torch.arange(len(experts) + 1, device=x_TD.device))
        grouping = Grouping(order, starts, chosen)
    hidden = torch.empty(tokens * chosen, experts.inner, dtype=x_TD.dtype, device=x_TD.device)
    products = torch.empty(tokens * chosen, width, dtype=torch.float32, device=x_TD.device)
    up, gate, down = experts.up_EID, experts.gate_EID, experts.down_EDI
    product = partial(_product, experts_TK=experts_TK, grouping=grouping)
    if isinstance(up, Quantised):
        assert grouping is not None
        gates = None
        if gate is not None:
            assert isinstance(gate, Quantised)
            gates = torch.empty(hidden.shape, dtype=torch.float32, device=x_TD.device)
            grouped_quantised(x_TD, gate, grouping, gates, up=True)
        grouped_quantised(x_TD, up, grouping, hidden, up=True, activation=experts.activation, gate=gates)
    else:
        assert not isinstance(gate, Quantised)
        product(x_TD, up, gate, hidden, up=True, activation=experts.activation)
    if isinstance(down, Quantised):
        assert grouping is not None
        grouped_quantised(hidden, down, grouping, products, up=False)
    else:
        product(hidden, down, None, products, up=False, activation=experts.activation)
    out = torch.empty_like(x_TD)
    _add_pairs(products, weights_TK, out)
    return out


def _add_pairs(pairs_XD: Tensor, weights_TK: Tensor, out_TD: Tensor) -> None:
    """Writes each token's sum of its pairs times their weights, added in the order of its choices."""
    tokens, width = out_TD.shape
    launch(
        _sum_pairs,
        (tokens, triton.cdiv(width, 1024)),
        p_pairs=pairs_XD,
        p_weights=weights_TK,
        p_out=out_TD,
        K=weights_TK.shape[1],
        D=width,
        BLOCK=1024,
        num_warps=4,
    )


def _product(
    given: Tensor, weight: Tensor, gate: Tensor | None, result: Tensor, *, experts_TK: Tensor,
    grouping: Grouping | None, up: bool, activation: str,
) -> None:  # fmt: skip
    """Writes each pair's product with a plain weight. Without a grouping, each pair reads its expert's weight."""
    pairs, outputs, (count, _, inputs) = result.shape[0], result.shape[1], weight.shape
    assert inputs * outputs < 2**31
    table = by_architecture(TILES if gate is None else TILES_GATED, given.device)
    tile = tile_of(TILES_FLOAT32 if given.dtype == torch.float32 else table, pairs, count)
    launch(
        _grouped,
        (triton.cdiv(outputs, tile.outputs), pairs if grouping is None else pairs // tile.rows + count),
        p_in=given,
        p_weight=weight,
        p_gate=weight if gate is None else gate,
        p_experts=experts_TK,
        p_order=experts_TK if grouping is None else grouping.order,
        p_starts=experts_TK if grouping is None else grouping.starts,
        p_out=result,
        experts=count,
        K=experts_TK.shape[1],
        IN=inputs,
        OUT=outputs,
        BLOCK_E=triton.next_power_of_2(count),
        BLOCK_M=tile.rows,
        BLOCK_N=tile.outputs,
        BLOCK_K=tile.inputs,
        SEPARATE=grouping is None,
        UP=up,
        ACT=activation,
        GATED=gate is not None,
        FENCES=needs_fences(given.dtype, given.device),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **one_instruction(given.device),
    )
