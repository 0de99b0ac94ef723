"""Unmasked attention over packed sequences in Triton; README.md has the maths, FLOPs and bytes.

R packed rows, H heads, D features per head (at most MAIN + REST), N sequences; GROUP heads share keys and values. A
program computes M rows of one sequence and head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.exponentials import LOG2_E
from kernels.launch import by_architecture, launch
from kernels.segment_kernel import find_segment
from kernels.tiles import AttentionTile as Tile

# By architecture, then by the width of a head: up to 64, or wider. Chosen so that 64, 80, 96 and 128 do not spill.
TILES = {
    "sm_80": (Tile(128, 64, 4, 3), Tile(128, 64, 8, 3)),
    "sm_90": (Tile(128, 64, 4, 3), Tile(128, 64, 8, 3)),
    "sm_100": (Tile(128, 64, 4, 3), Tile(128, 64, 8, 3)),
    "gfx942": (Tile(128, 32, 4, 1), Tile(128, 32, 8, 1)),
}
TILE_FLOAT32 = Tile(32, 32, 4, 2)


@triton.jit
def _load_rows(p_rows, m_n, o_d, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """[N, d]: features `o_d` of the rows [N, 1]; zeros outside of `m_n` and D."""
    return tl.load(p_rows + o_d[None, :], mask=m_n[:, None] & (o_d < D)[None, :], other=0.0)


@triton.jit
def _load_columns(p_columns, m_n, o_d, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """[d, N]: features `o_d` of the columns [1, N]; zeros outside of `m_n` and D."""
    return tl.load(p_columns + o_d[:, None], mask=m_n[None, :] & (o_d < D)[:, None], other=0.0)


@triton.jit
def _weigh(scores, top, total):  # type: ignore[no-untyped-def]
    """One step of the running softmax: (weights of a block's keys, what is left of earlier sums, largest score so far,
    sum of the weights). Scores are base 2; every block of a sequence has a key, so the largest one is never -inf."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - new_top[:, None])
    decay = tl.exp2(top - new_top)
    return weights, decay, new_top, total * decay + tl.sum(weights, 1)


@triton.jit(do_not_specialize=["sequences"])
def _varlen(  # type: ignore[no-untyped-def]
    p_q,  # [R, H, D]
    p_k,  # [R, H / GROUP, D]
    p_v,  # [R, H / GROUP, D]
    p_out,  # [R, H, D]
    p_starts,  # [N + 1]
    sequences,
    scale,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    out_row,
    out_head,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EIGHTHS: tl.constexpr,
):
    if EIGHTHS:
        # The compiler specialises only for multiples of 16, and would load heads of 72 element by element.
        q_row, q_head, k_row, k_head = q_row // 8 * 8, q_head // 8 * 8, k_row // 8 * 8, k_head // 8 * 8
        v_row, v_head, out_row, out_head = v_row // 8 * 8, v_head // 8 * 8, out_row // 8 * 8, out_head // 8 * 8
    i_block = tl.program_id(0)
    i_head = tl.program_id(1).to(tl.int64)
    i_sequence = find_segment(p_starts, sequences, i_block, BLOCK_M)
    begin = tl.load(p_starts + i_sequence).to(tl.int32)
    length = tl.load(p_starts + i_sequence + 1).to(tl.int32) - begin
    first = (i_block - begin // BLOCK_M - i_sequence) * BLOCK_M
    if first >= length:
        return
    o_m = first + tl.arange(0, BLOCK_M)
    o_n = tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, MAIN)
    m_m = o_m < length
    o_row = (begin + o_m).to(tl.int64)
    p_q_rows = p_q + i_head * q_head + (o_row * q_row)[:, None]
    p_k_head = p_k + i_head // GROUP * k_head
    p_v_head = p_v + i_head // GROUP * v_head
    q = _load_rows(p_q_rows, m_m, o_d, D)
    acc = tl.zeros([BLOCK_M, MAIN], tl.float32)
    # A head of 80 is 64 + 16: with one block of 128 a third of the products would be with zeros.
    if REST > 0:
        o_e = MAIN + tl.arange(0, REST)
        q_rest = _load_rows(p_q_rows, m_m, o_e, D)
        acc_rest = tl.zeros([BLOCK_M, REST], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for i in range(tl.cdiv(length, BLOCK_N)):
        o_key = i * BLOCK_N + o_n
        m_n = o_key < length
        at = (begin + o_key).to(tl.int64)
        k = _load_columns(p_k_head + (at * k_row)[None, :], m_n, o_d, D)
        scores = tl.dot(q, k, input_precision="ieee")
        if REST > 0:
            k_rest = _load_columns(p_k_head + (at * k_row)[None, :], m_n, o_e, D)
            scores = tl.dot(q_rest, k_rest, scores, input_precision="ieee")
        scores = tl.where(m_n[None, :], scores * scale, float("-inf"))
        weights, decay, top, total = _weigh(scores, top, total)
        v = _load_rows(p_v_head + (at * v_row)[:, None], m_n, o_d, D)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        if REST > 0:
            v_rest = _load_rows(p_v_head + (at * v_row)[:, None], m_n, o_e, D)
            acc_rest = tl.dot(weights.to(v.dtype), v_rest, acc_rest * decay[:, None], input_precision="ieee")
    p_o = p_out + i_head * out_head + (o_row * out_row)[:, None]
    out_type = p_out.dtype.element_ty
    tl.store(p_o + o_d[None, :], (acc / total[:, None]).to(out_type), mask=m_m[:, None] & (o_d < D)[None, :])
    if REST > 0:
        m_rest = m_m[:, None] & (o_e < D)[None, :]
        tl.store(p_o + o_e[None, :], (acc_rest / total[:, None]).to(out_type), mask=m_rest)


def head_parts(width: int) -> tuple[int, int]:
    """(MAIN, REST): powers of two, at least 16, whose sum covers a head; REST is 0 if MAIN suffices. 80 -> (64, 16),
    128 -> (128, 0), 72 -> (64, 16)."""
    main = max(triton.next_power_of_2(width + 1) // 2, 16)
    if width <= main:
        return main, 0
    rest = max(triton.next_power_of_2(width - main), 16)
    return (main * 2, 0) if rest == main else (main, rest)


def varlen_attention(
    q_RHD: Tensor, k_RHD: Tensor, v_RHD: Tensor, cu_seqlens: Tensor, max_seqlen: int, *, scale: float
) -> Tensor:
    """Like the reference, but without a host read: `cu_seqlens` is not checked, and `max_seqlen` is not used."""
    rows, heads, width = q_RHD.shape
    out_RHD = torch.empty(rows, heads, width, dtype=q_RHD.dtype, device=q_RHD.device)
    sequences = cu_seqlens.shape[0] - 1
    assert q_RHD.stride(-1) == k_RHD.stride(-1) == v_RHD.stride(-1) == 1
    main, rest = head_parts(width)
    small, large = by_architecture(TILES, q_RHD.device)
    strides = [x.stride(i) for x in (q_RHD, k_RHD, v_RHD, out_RHD) for i in (0, 1)]
    eighths = all(stride % 8 == 0 for stride in strides) and any(stride % 16 for stride in strides)
    tile = TILE_FLOAT32 if q_RHD.dtype == torch.float32 else large if width > 64 else small
    launch(
        _varlen,
        (rows // tile.queries + sequences, heads),
        p_q=q_RHD,
        p_k=k_RHD,
        p_v=v_RHD,
        p_out=out_RHD,
        p_starts=cu_seqlens,
        sequences=sequences,
        scale=scale * LOG2_E,  # the softmax is one of powers of 2
        q_row=q_RHD.stride(0),
        q_head=q_RHD.stride(1),
        k_row=k_RHD.stride(0),
        k_head=k_RHD.stride(1),
        v_row=v_RHD.stride(0),
        v_head=v_RHD.stride(1),
        out_row=out_RHD.stride(0),
        out_head=out_RHD.stride(1),
        GROUP=heads // k_RHD.shape[1],
        D=width,
        MAIN=main,
        REST=rest,
        BLOCK_M=tile.queries,
        BLOCK_N=tile.keys,
        EIGHTHS=eighths,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out_RHD
