"""Decays and betas of the gated delta rule in Triton, one token per program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import launch
from kernels.selective_state_update.kernel import softplus


@triton.jit
def _gates_kernel(
    p_b,  # [T, H]
    p_a,  # [T, H]
    p_A,  # [H] float32
    p_dt_bias,  # [H] float32
    p_log_decay,  # [T, H] float32
    p_beta,  # [T, H] float32
    beta_scale,
    b_stride,
    a_stride,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    o_h = tl.arange(0, BLOCK)
    m_h = o_h < HEADS
    b_a = tl.load(p_a + i_token * a_stride + o_h, mask=m_h, other=0.0).to(tl.float32)
    b_b = tl.load(p_b + i_token * b_stride + o_h, mask=m_h, other=0.0).to(tl.float32)
    b_step = softplus(b_a + tl.load(p_dt_bias + o_h, mask=m_h, other=0.0))
    tl.store(p_log_decay + i_token * HEADS + o_h, tl.load(p_A + o_h, mask=m_h, other=0.0) * b_step, mask=m_h)
    tl.store(p_beta + i_token * HEADS + o_h, tl.sigmoid(b_b) * beta_scale, mask=m_h)


def delta_gates(b: Tensor, a: Tensor, A_H: Tensor, dt_bias_H: Tensor, beta_scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Like the reference, for `[T, H]`. No host sync."""
    tokens, heads = a.shape
    assert a.stride(1) == 1 == b.stride(1)
    log_decay, beta = (torch.empty(tokens, heads, dtype=torch.float32, device=a.device) for _ in range(2))
    launch(
        _gates_kernel,
        (tokens,),
        p_b=b,
        p_a=a,
        p_A=A_H,
        p_dt_bias=dt_bias_H,
        p_log_decay=log_decay,
        p_beta=beta,
        beta_scale=beta_scale,
        b_stride=b.stride(0),
        a_stride=a.stride(0),
        HEADS=heads,
        BLOCK=triton.next_power_of_2(heads),
        num_warps=1,
    )
    return log_decay, beta
