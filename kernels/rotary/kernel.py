"""Norm and rotation of heads in Triton; the maths is in README.md. One program computes a few heads of one token.

All arithmetic between load and store is float32, cosines and sines included.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import launch

ELEMENTS = 2048
"""Elements of a program of 4 warps: 16 per thread."""
MOST_AXES = 3
MOST_FREQUENCIES = 64
"""Bits of the masks that give each frequency's axis; with several axes there must be fewer frequencies."""


@triton.jit
def _norm_rotate_kernel(
    p_x,  # [T, H, P]
    p_norm_q,  # [P] float32; with NORM
    p_norm_k,  # [P] float32; with NORM
    p_table,  # [L, 2, HALF] float32; with HALF
    p_positions,  # [T, A]; with HALF
    p_out,  # [T, H, P]
    eps,
    x_token,
    x_head,
    position_token,
    position_axis,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    o_p = tl.arange(0, BLOCK_P)[None, :]
    m_x = (o_h < HEADS) & (o_p < WIDTH)
    p_x += i_token * x_token + o_h * x_head
    b_x = tl.load(p_x + o_p, mask=m_x, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(b_x * b_x, 1, keep_dims=True) / WIDTH + eps)
        m_q, m_k = m_x & (o_h < QUERIES), m_x & (o_h >= QUERIES)
        b_w = tl.load(p_norm_q + o_p + 0 * o_h, mask=m_q, other=0.0)
        b_w += tl.load(p_norm_k + o_p + 0 * o_h, mask=m_k, other=0.0)
        b_x = b_x * scale * b_w
    if HALF > 0:
        # Each element and its partner, whose load hits the cache: pairs are (i, i + HALF).
        o_f = tl.where(o_p < HALF, o_p, o_p - HALF)
        o_other = tl.where(o_p < HALF, o_p + HALF, o_p - HALF)
        m_turned = o_p < 2 * HALF
        m_other = m_x & m_turned
        b_other = tl.load(p_x + o_other, mask=m_other, other=0.0).to(tl.float32)
        if NORM:
            b_w = tl.load(p_norm_q + o_other + 0 * o_h, mask=m_q & m_turned, other=0.0)
            b_w += tl.load(p_norm_k + o_other + 0 * o_h, mask=m_k & m_turned, other=0.0)
            b_other = b_other * scale * b_w
        o_bit = tl.where(m_turned, o_f, 0).to(tl.int64)
        o_axis = ((SECOND >> o_bit) & 1) + 2 * ((THIRD >> o_bit) & 1)
        at = tl.load(p_positions + i_token * position_token + o_axis * position_axis).to(tl.int64)
        p_turn = p_table + tl.maximum(at, 0) * (2 * HALF) + o_f
        b_cos = tl.load(p_turn, mask=m_turned, other=1.0)
        b_sin = tl.load(p_turn + HALF, mask=m_turned, other=0.0)
        b_x = b_x * b_cos + tl.where(o_p < HALF, -b_other, b_other) * b_sin
    p_out += (i_token * HEADS + o_h) * WIDTH + o_p
    tl.store(p_out, b_x.to(p_out.dtype.element_ty), mask=m_x)


def norm_rotate(
    x_THP: Tensor,
    heads: int,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    table: Tensor | None,
    positions_TA: Tensor | None,
    axes: tuple[int, ...] = (),
) -> Tensor:
    """Like the reference, but rounded only once, at the end. At most 3 axes, and with several axes fewer than 64
    frequencies: otherwise raises `ValueError`. No host sync."""
    tokens, count, width = x_THP.shape
    assert x_THP.stride(2) == 1 and (table is None or table.is_contiguous())
    half = 0 if table is None else table.shape[-1]
    second, third = axis_masks(axes)
    q_norm, k_norm = norms or (x_THP, x_THP)
    at = x_THP if positions_TA is None else positions_TA
    out = torch.empty(tokens, count, width, dtype=x_THP.dtype, device=x_THP.device)
    block = triton.next_power_of_2(width)
    block_h = min(max(1, ELEMENTS // block), triton.next_power_of_2(count))
    launch(
        _norm_rotate_kernel,
        (tokens, triton.cdiv(count, block_h)),
        p_x=x_THP,
        p_norm_q=q_norm,
        p_norm_k=k_norm,
        p_table=x_THP if table is None else table,
        p_positions=at,
        p_out=out,
        eps=eps,
        x_token=x_THP.stride(0),
        x_head=x_THP.stride(1),
        position_token=at.stride(0),
        position_axis=at.stride(1),
        HEADS=count,
        QUERIES=heads,
        WIDTH=width,
        HALF=half,
        NORM=norms is not None,
        SECOND=second,
        THIRD=third,
        BLOCK_H=block_h,
        BLOCK_P=block,
        num_warps=max(1, min(4, block * block_h // 512)),
    )
    return out


def axis_masks(axes: tuple[int, ...]) -> tuple[int, int]:
    """(mask of the second axis, mask of the third): bit i is set if frequency i takes that axis. Raises `ValueError`
    for more axes or frequencies than the kernel supports."""
    if not any(axes):
        return 0, 0
    if max(axes) >= MOST_AXES or len(axes) >= MOST_FREQUENCIES:
        raise ValueError(
            f"with several axes the kernel supports at most {MOST_AXES} axes and {MOST_FREQUENCIES - 1} frequencies, "
            f"but the model has {max(axes) + 1} and {len(axes)}"
        )
    second, third = (sum(1 << i for i, axis in enumerate(axes) if axis == which) for which in (1, 2))
    return second, third


def rotate(x_THP: Tensor, table: Tensor, positions_TA: Tensor, axes: tuple[int, ...] = ()) -> Tensor:
    """Like the reference, but rounded only once, at the end. No host sync."""
    return norm_rotate(x_THP, x_THP.shape[1], None, 0.0, table, positions_TA, axes)
