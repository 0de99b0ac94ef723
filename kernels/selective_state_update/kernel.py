"""The one-token recurrence in Triton; the maths, bytes and the reasons for the configurations are in README.md.

A program holds `BLOCK_P` channels of one head's state in registers: it reads the state once and writes it once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import by_architecture, launch
from kernels.slots import SlotRun

ELEMENTS = {"sm_80": 2048, "sm_90": 2048, "sm_100": 2048, "gfx942": 4096}
"""State elements of a program of 4 warps: 8 or 16 kB in flight, 16 registers of state a thread."""


@triton.jit
def softplus(x):
    """`log(1 + e^x)` in float32, without losing small results: `log1p(u) = log(w) u / (w - 1)` for `w = 1 + u`, exact
    where w rounds to 1.
    """
    u = tl.exp(-tl.abs(x))
    w = 1.0 + u
    small = tl.where(w == 1.0, u, tl.log(w) * (u / tl.where(w == 1.0, 1.0, w - 1.0)))
    return tl.maximum(x, 0.0) + small


@triton.jit
def step_size(dt, bias, limit_low, limit_high, LIMITED: tl.constexpr):
    """A raw step size plus bias, through softplus and the model's limits."""
    dt = softplus(dt.to(tl.float32) + bias)
    if LIMITED:
        dt = tl.minimum(tl.maximum(dt, limit_low), limit_high)
    return dt


@triton.jit
def _update_kernel(
    p_pool,  # [S, H, P, N]
    p_slots,  # [R]
    p_x,  # [R, H, P]
    p_dt,  # [R, H]
    p_A,  # [H] float32
    p_B,  # [R, G, N]
    p_C,  # [R, G, N]
    p_D,  # [H] float32
    p_dt_bias,  # [H] float32
    p_out,  # [R, H, P]
    limit_low,
    limit_high,
    slot_stride,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
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

    slot = tl.load(p_slots + i_row).to(tl.int64)
    o_state = i_head * WIDTH * STATE + o_p[:, None] * STATE + o_n[None, :]
    p_state = p_pool + slot * slot_stride + o_state
    m_state = m_state & (slot >= 0)
    b_h = tl.load(p_state, mask=m_state, other=0.0, eviction_policy="evict_first").to(tl.float32)

    o_group = (i_head // HEADS_OF_GROUP) * STATE + o_n
    b_x = tl.load(p_x + i_row * x_stride + i_head * WIDTH + o_p, mask=m_p, other=0.0).to(tl.float32)
    b_B = tl.load(p_B + i_row * b_stride + o_group, mask=m_n, other=0.0).to(tl.float32)
    b_C = tl.load(p_C + i_row * c_stride + o_group, mask=m_n, other=0.0).to(tl.float32)
    dt = tl.load(p_dt + i_row * dt_stride + i_head)
    dt = step_size(dt, tl.load(p_dt_bias + i_head), limit_low, limit_high, LIMITED)
    decay = tl.exp(dt * tl.load(p_A + i_head))

    b_h = b_h * decay + (b_x * dt)[:, None] * b_B[None, :]
    tl.store(p_state, b_h.to(p_pool.dtype.element_ty), mask=m_state)
    b_y = tl.sum(b_h * b_C[None, :], 1) + b_x * tl.load(p_D + i_head)
    tl.store(p_out + (i_row * HEADS + i_head) * WIDTH + o_p, b_y.to(p_out.dtype.element_ty), mask=m_p)


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
    """As the reference, but x, B, C may have any float dtype and the result has x's. `runs` is not needed here.

    Rows may lie apart; heads, channels and states of a row are contiguous, and so is each slot. No host sync.
    """
    rows, heads, width = x_RHP.shape
    groups, state = B_RGN.shape[1:]
    assert pool_SHPN.stride()[1:] == (width * state, state, 1)
    assert x_RHP.stride()[1:] == (width, 1) and B_RGN.stride()[1:] == (state, 1) == C_RGN.stride()[1:]
    assert dt_RH.stride(1) == 1
    out = torch.empty(rows, heads, width, dtype=x_RHP.dtype, device=x_RHP.device)
    block_n = triton.next_power_of_2(state)
    block_p = max(1, min(by_architecture(ELEMENTS, x_RHP.device) // block_n, triton.next_power_of_2(width)))
    launch(
        _update_kernel,
        (heads * triton.cdiv(width, block_p), rows),
        p_pool=pool_SHPN,
        p_slots=slots_R,
        p_x=x_RHP,
        p_dt=dt_RH,
        p_A=A_H,
        p_B=B_RGN,
        p_C=C_RGN,
        p_D=D_H,
        p_dt_bias=dt_bias_H,
        p_out=out,
        limit_low=limit[0],
        limit_high=limit[1],
        slot_stride=pool_SHPN.stride(0),
        x_stride=x_RHP.stride(0),
        dt_stride=dt_RH.stride(0),
        b_stride=B_RGN.stride(0),
        c_stride=C_RGN.stride(0),
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
