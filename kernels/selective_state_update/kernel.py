"""The Mamba-2 recurrence in Triton, one or several tokens per row; README.md has the maths, bytes and reasons for the
sizes.

A program holds `BLOCK_P` channels of one head's state in registers: it reads the state once, and writes it once for
each token that has a slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import OF_ROWS, by_architecture, launch
from kernels.slots import SlotRun

ELEMENTS = {"sm_80": 2048, "sm_90": 2048, "sm_100": 2048, "gfx942": 4096}
"""State elements of a program of 4 warps: 8 kB of float32 in flight and 16 registers of state per thread (16 kB on
gfx942, whose warps have 64 threads)."""


@triton.jit
def softplus(x):
    """`log(1 + e^x)` in float32, accurate for small results too: `log1p(u) = log(w) u / (w - 1)` with `w = 1 + u`, and
    u itself where w rounds to 1."""
    u = tl.exp(-tl.abs(x))
    w = 1.0 + u
    small = tl.where(w == 1.0, u, tl.log(w) * (u / tl.where(w == 1.0, 1.0, w - 1.0)))
    return tl.maximum(x, 0.0) + small


@triton.jit
def step_size(dt, bias, limit_low, limit_high, LIMITED: tl.constexpr):
    """The step size: softplus of the raw step size plus bias, clamped to the model's limits."""
    dt = softplus(dt.to(tl.float32) + bias)
    if LIMITED:
        dt = tl.minimum(tl.maximum(dt, limit_low), limit_high)
    return dt


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
def _update_kernel(
    p_pool,  # [S, H, P, N]
    p_slots,  # [R, K], K >= T
    p_accepted,  # [R]; with SEVERAL
    p_lengths,  # [R]; with SEVERAL
    p_x,  # [R, T, H, P]
    p_dt,  # [R, T, H]
    p_A,  # [H] float32
    p_B,  # [R, T, G, N]
    p_C,  # [R, T, G, N]
    p_D,  # [H] float32
    p_dt_bias,  # [H] float32
    p_out,  # [R, T, H, P]
    limit_low,
    limit_high,
    slot_stride,
    slots_stride,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    TOKENS: tl.constexpr,
    SEVERAL: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    STATE: tl.constexpr,
    HEADS_OF_GROUP: tl.constexpr,
    LIMITED: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    i_row = tl.program_id(1).to(tl.int64)
    i_head = tl.program_id(0) // tl.cdiv(WIDTH, BLOCK_P)
    o_p = (tl.program_id(0) % tl.cdiv(WIDTH, BLOCK_P)) * BLOCK_P + tl.arange(0, BLOCK_P)
    o_n = tl.arange(0, BLOCK_N)
    m_p, m_n = o_p < WIDTH, o_n < STATE
    m_state = m_p[:, None] & m_n[None, :]

    p_slots += i_row * slots_stride
    read, length = 0, TOKENS
    if SEVERAL:
        read = tl.load(p_accepted + i_row) - 1
        length = tl.load(p_lengths + i_row)
    slot = tl.load(p_slots + read).to(tl.int64)
    p_pool += i_head * WIDTH * STATE
    o_state = o_p[:, None] * STATE + o_n[None, :]
    m_read = m_state & (slot >= 0)
    b_h = tl.load(p_pool + slot * slot_stride + o_state, mask=m_read, other=0.0, eviction_policy="evict_first")
    b_h = b_h.to(tl.float32)
    a, d, bias = tl.load(p_A + i_head), tl.load(p_D + i_head), tl.load(p_dt_bias + i_head)
    o_group = (i_head // HEADS_OF_GROUP) * STATE + o_n
    for token in tl.static_range(TOKENS):
        i_token = i_row * TOKENS + token
        b_x = tl.load(p_x + i_token * x_stride + i_head * WIDTH + o_p, mask=m_p, other=0.0).to(tl.float32)
        b_B = tl.load(p_B + i_token * b_stride + o_group, mask=m_n, other=0.0).to(tl.float32)
        b_C = tl.load(p_C + i_token * c_stride + o_group, mask=m_n, other=0.0).to(tl.float32)
        dt = step_size(tl.load(p_dt + i_token * dt_stride + i_head), bias, limit_low, limit_high, LIMITED)
        b_h = b_h * tl.exp(dt * a) + (b_x * dt)[:, None] * b_B[None, :]
        slot = tl.load(p_slots + token).to(tl.int64)
        m_write = m_state & (slot >= 0) & (token < length)
        tl.store(p_pool + slot * slot_stride + o_state, b_h.to(p_pool.dtype.element_ty), mask=m_write)
        b_y = tl.sum(b_h * b_C[None, :], 1) + b_x * d
        tl.store(p_out + (i_token * HEADS + i_head) * WIDTH + o_p, b_y.to(p_out.dtype.element_ty), mask=m_p)


def selective_state_update(
    pool_SHPN: Tensor,
    slots_R: Tensor,
    x_RHP: Tensor,
    dt_RH: Tensor,
    A_H: Tensor,
    B_RGN: Tensor,
    C_RGN: Tensor,
    D_H: Tensor,
    dt_bias_H: Tensor,
    limit: tuple[float, float] = (0.0, float("inf")),
    runs: Sequence[SlotRun] | None = None,
) -> Tensor:
    """Like the reference, but x, B, C may have any float dtype and the result has x's. `runs` is not needed here.

    Rows may have any stride; heads, channels and states of a row are contiguous, and so is each slot. No host sync.
    """
    x, dt, b, c = x_RHP[:, None], dt_RH[:, None], B_RGN[:, None], C_RGN[:, None]
    return _update(pool_SHPN, slots_R, None, None, x, dt, A_H, b, c, D_H, dt_bias_H, limit)[:, 0]


def selective_state_update_tokens(
    pool_SHPN: Tensor,
    slots_RK: Tensor,
    accepted_R: Tensor,
    lengths_R: Tensor,
    x_RTHP: Tensor,
    dt_RTH: Tensor,
    A_H: Tensor,
    B_RTGN: Tensor,
    C_RTGN: Tensor,
    D_H: Tensor,
    dt_bias_H: Tensor,
    limit: tuple[float, float] = (0.0, float("inf")),
) -> Tensor:
    """Like the reference for float32 states, with dtypes and strides as in `selective_state_update`; the stride of rows
    must be that of tokens times T. The state stays in registers from token to token. No host sync."""
    assert pool_SHPN.dtype == torch.float32, "states stay in registers, and are not rounded there"
    given = (x_RTHP, dt_RTH, A_H, B_RTGN, C_RTGN, D_H, dt_bias_H, limit)
    return _update(pool_SHPN, slots_RK, accepted_R, lengths_R, *given)


def token_stride(tensor: Tensor) -> int:
    """Elements from one token to the next, which must be the same within a row and from row to row."""
    rows, tokens = tensor.shape[:2]
    assert rows == 1 or tokens == 1 or tensor.stride(0) == tokens * tensor.stride(1), "rows of tokens lie apart"
    return tensor.stride(0) if tokens == 1 else tensor.stride(1)


def _update(
    pool_SHPN: Tensor,
    slots: Tensor,
    accepted_R: Tensor | None,
    lengths_R: Tensor | None,
    x_RTHP: Tensor,
    dt_RTH: Tensor,
    A_H: Tensor,
    B_RTGN: Tensor,
    C_RTGN: Tensor,
    D_H: Tensor,
    dt_bias_H: Tensor,
    limit: tuple[float, float],
) -> Tensor:
    rows, tokens, heads, width = x_RTHP.shape
    groups, state = B_RTGN.shape[2:]
    assert pool_SHPN.stride()[1:] == (width * state, state, 1) and slots.stride(-1) == 1
    assert x_RTHP.stride()[2:] == (width, 1) and B_RTGN.stride()[2:] == (state, 1) == C_RTGN.stride()[2:]
    assert dt_RTH.stride(2) == 1
    out = torch.empty(rows, tokens, heads, width, dtype=x_RTHP.dtype, device=x_RTHP.device)
    block_n = triton.next_power_of_2(state)
    block_p = max(1, min(by_architecture(ELEMENTS, x_RTHP.device) // block_n, triton.next_power_of_2(width)))
    launch(
        _update_kernel,
        (heads * triton.cdiv(width, block_p), rows),
        p_pool=pool_SHPN,
        p_slots=slots,
        p_accepted=slots if accepted_R is None else accepted_R,
        p_lengths=slots if lengths_R is None else lengths_R,
        p_x=x_RTHP,
        p_dt=dt_RTH,
        p_A=A_H,
        p_B=B_RTGN,
        p_C=C_RTGN,
        p_D=D_H,
        p_dt_bias=dt_bias_H,
        p_out=out,
        limit_low=limit[0],
        limit_high=limit[1],
        slot_stride=pool_SHPN.stride(0),
        slots_stride=slots.stride(0),
        x_stride=token_stride(x_RTHP),
        dt_stride=token_stride(dt_RTH),
        b_stride=token_stride(B_RTGN),
        c_stride=token_stride(C_RTGN),
        TOKENS=tokens,
        SEVERAL=accepted_R is not None,
        HEADS=heads,
        WIDTH=width,
        STATE=state,
        HEADS_OF_GROUP=heads // groups,
        LIMITED=limit != (0.0, float("inf")),
        BLOCK_P=block_p,
        BLOCK_N=block_n,
        num_warps=4,
    )
    return out
