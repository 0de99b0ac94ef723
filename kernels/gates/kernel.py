"""Gated products in Triton; the maths is in README.md."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import launch

BLOCK = 1024
"""Elements of a program of 2 warps: 16 per thread."""


@triton.jit
def _product_kernel(
    p_x,  # [T, D]
    p_gate,  # [T, G]
    p_out,  # [T, D]
    x_row,
    gate_row,
    WIDTH: tl.constexpr,
    SHARING: tl.constexpr,  # numbers that a gate is for
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    o_col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_col = o_col < WIDTH
    b_x = tl.load(p_x + i_row * x_row + o_col, mask=m_col, other=0.0).to(tl.float32)
    b_gate = tl.load(p_gate + i_row * gate_row + o_col // SHARING, mask=m_col, other=0.0).to(tl.float32)
    b_out = b_x * tl.sigmoid(b_gate)
    if SILU:
        b_out = b_out * b_gate
    tl.store(p_out + i_row * WIDTH + o_col, b_out.to(p_out.dtype.element_ty), mask=m_col)


@triton.jit
def _add_gated_kernel(
    p_routed,  # [T, D]
    p_shared,  # [T, D]
    p_x,  # [T, D]
    p_weight,  # [D] float32
    p_out,  # [T, D]
    routed_row,
    shared_row,
    x_row,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    o_col = tl.arange(0, BLOCK)
    b_sum = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, WIDTH, BLOCK):
        m_col = begin + o_col < WIDTH
        b_x = tl.load(p_x + i_row * x_row + begin + o_col, mask=m_col, other=0.0).to(tl.float32)
        b_sum += b_x * tl.load(p_weight + begin + o_col, mask=m_col, other=0.0)
    gate = tl.sigmoid(tl.sum(b_sum, 0))
    for begin in range(0, WIDTH, BLOCK):
        m_col = begin + o_col < WIDTH
        b_routed = tl.load(p_routed + i_row * routed_row + begin + o_col, mask=m_col, other=0.0).to(tl.float32)
        b_shared = tl.load(p_shared + i_row * shared_row + begin + o_col, mask=m_col, other=0.0).to(tl.float32)
        b_out = b_routed + gate * b_shared
        tl.store(p_out + i_row * WIDTH + begin + o_col, b_out.to(p_out.dtype.element_ty), mask=m_col)


def sigmoid_gate(x_TD: Tensor, gate_TG: Tensor) -> Tensor:
    """Like the reference, but rounded only once, at the end. No host sync."""
    return _product(x_TD, gate_TG, silu=False)


def swiglu(gate_up_TI: Tensor) -> Tensor:
    """Like the reference, but rounded only once, at the end. No host sync."""
    gate, up = gate_up_TI.chunk(2, dim=-1)
    return _product(up, gate, silu=True)


def _product(x_TD: Tensor, gate_TG: Tensor, *, silu: bool) -> Tensor:
    rows, width = x_TD.shape
    assert gate_TG.shape[0] == rows and width % gate_TG.shape[1] == 0 and x_TD.stride(1) == gate_TG.stride(1) == 1
    out = torch.empty(rows, width, dtype=x_TD.dtype, device=x_TD.device)
    block = min(BLOCK, triton.next_power_of_2(width))
    launch(
        _product_kernel,
        (rows, triton.cdiv(width, block)),
        p_x=x_TD,
        p_gate=gate_TG,
        p_out=out,
        x_row=x_TD.stride(0),
        gate_row=gate_TG.stride(0),
        WIDTH=width,
        SHARING=width // gate_TG.shape[1],
        SILU=silu,
        BLOCK=block,
        num_warps=2,
    )
    return out


def add_gated(routed_TD: Tensor, shared_TD: Tensor, x_TD: Tensor, weight_1D: Tensor) -> Tensor:
    """Like the reference, but rounded only once, at the end. No host sync."""
    rows, width = routed_TD.shape
    assert routed_TD.stride(1) == shared_TD.stride(1) == x_TD.stride(1) == weight_1D.stride(1) == 1
    out = torch.empty(rows, width, dtype=routed_TD.dtype, device=routed_TD.device)
    launch(
        _add_gated_kernel,
        (rows,),
        p_routed=routed_TD,
        p_shared=shared_TD,
        p_x=x_TD,
        p_weight=weight_1D,
        p_out=out,
        routed_row=routed_TD.stride(0),
        shared_row=shared_TD.stride(0),
        x_row=x_TD.stride(0),
        WIDTH=width,
        BLOCK=min(BLOCK, triton.next_power_of_2(width)),
        num_warps=2,
    )
    return out
