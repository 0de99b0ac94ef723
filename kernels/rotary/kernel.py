"""Norm and rotation of heads in Triton; the maths is in README.md. One program computes a few heads of one token.

All arithmetic between load and store is float32, cosines and sines included.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import by_architecture, launch

SIZES = {"sm_80": (2048, 4), "sm_90": (2048, 4), "sm_100": (2048, 4), "gfx942": (2048, 4)}
"""By architecture: (most elements of a program, most warps). Programs have at least 512 elements per warp, if there are
as many heads."""
MOST_AXES = 3
MOST_FREQUENCIES = 64
"""Bits of the masks that give each frequency's axis; with several axes there must be fewer frequencies."""


@triton.jit
def _normed(b_x, scale, p_norm_q, p_norm_k, o_h, o_p, QUERIES, COUNT, NORM: tl.constexpr):
    """`[H, COUNT]` of queries and keys, times the scale of each head and the weights, which are read once for all
    heads."""
    if NORM:
        b_q = tl.load(p_norm_q + o_p, mask=o_p < COUNT, other=0.0)
        b_k = tl.load(p_norm_k + o_p, mask=o_p < COUNT, other=0.0)
        b_x = b_x * scale * tl.where(o_h < QUERIES, b_q, b_k)
    return b_x


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
    BLOCK_F: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    o_p = tl.arange(0, BLOCK_P)[None, :]
    m_x = (o_h < HEADS) & (o_p < WIDTH)
    p_x += i_token * x_token + o_h * x_head
    p_out += (i_token * HEADS + o_h) * WIDTH
    scale = 1.0
    if NORM or 2 * HALF < WIDTH:
        b_x = tl.load(p_x + o_p, mask=m_x, other=0.0).to(tl.float32)
        if NORM:
            scale = tl.rsqrt(tl.sum(b_x * b_x, 1, keep_dims=True) / WIDTH + eps)
        b_x = _normed(b_x, scale, p_norm_q, p_norm_k, o_h, o_p, QUERIES, WIDTH, NORM)
        tl.store(p_out + o_p, b_x.to(p_out.dtype.element_ty), mask=m_x & (o_p >= 2 * HALF))
    if HALF > 0:
        # The halves that turn, (i, i + HALF), are loaded again, from the cache. Positions, cosines and sines are those
        # of the token, for all heads.
        o_f = tl.arange(0, BLOCK_F)[None, :]
        m_f = o_f < HALF
        m_turned = (o_h < HEADS) & m_f
        o_bit = tl.where(m_f, o_f, 0).to(tl.int64)
        o_axis = ((SECOND >> o_bit) & 1) + 2 * ((THIRD >> o_bit) & 1)
        at = tl.load(p_positions + i_token * position_token + o_axis * position_axis).to(tl.int64)
        p_turn = p_table + tl.maximum(at, 0) * (2 * HALF) + o_f
        b_cos = tl.load(p_turn, mask=m_f, other=1.0)
        b_sin = tl.load(p_turn + HALF, mask=m_f, other=0.0)
        b_first = tl.load(p_x + o_f, mask=m_turned, other=0.0).to(tl.float32)
        b_second = tl.load(p_x + HALF + o_f, mask=m_turned, other=0.0).to(tl.float32)
        b_first = _normed(b_first, scale, p_norm_q, p_norm_k, o_h, o_f, QUERIES, HALF, NORM)
        b_second = _normed(b_second, scale, p_norm_q + HALF, p_norm_k + HALF, o_h, o_f, QUERIES, HALF, NORM)
        element = p_out.dtype.element_ty
        tl.store(p_out + o_f, (b_first * b_cos - b_second * b_sin).to(element), mask=m_turned)
        tl.store(p_out + HALF + o_f, (b_second * b_cos + b_first * b_sin).to(element), mask=m_turned)


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
    elements, warps = by_architecture(SIZES, x_THP.device)
    block_h = min(max(1, elements // block), triton.next_power_of_2(count))
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
        BLOCK_F=triton.next_power_of_2(max(1, half)),
        num_warps=max(1, min(warps, block * block_h // 512)),
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
