"""The gated, grouped norm in Triton; README.md has the maths, bytes and reasons for the configurations.

One program computes several whole groups of one row: y and the gate are read once, the result is written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import launch

ELEMENTS = 2048
"""Elements of a program of 4 warps: 16 per thread, two 16-byte loads of each bfloat16 input."""


@triton.jit
def _gated_norm_kernel(
    p_y,  # [rows, groups * GROUP]
    p_gate,  # [rows, groups * GROUP]
    p_weight,  # [groups * GROUP] float32; not read without NORM
    p_out,  # [rows, groups * GROUP]
    y_stride,
    gate_stride,
    out_stride,
    eps,
    gate_scale,
    groups,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    MANY: tl.constexpr,
    NORM: tl.constexpr,
    NORM_FIRST: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    o_group = tl.program_id(1) * MANY + tl.arange(0, MANY)[:, None]
    o_in = tl.arange(0, BLOCK)[None, :]
    m_col = (o_group < groups) & (o_in < GROUP)
    o_col = o_group * GROUP + o_in
    b_y = tl.load(p_y + i_row * y_stride + o_col, mask=m_col, other=0.0, eviction_policy="evict_first")
    b_gate = tl.load(p_gate + i_row * gate_stride + o_col, mask=m_col, other=0.0, eviction_policy="evict_first")
    b_gate = b_gate.to(tl.float32) * gate_scale
    b_silu = b_gate * tl.sigmoid(b_gate)
    b_out = b_y.to(tl.float32)
    if not NORM_FIRST:
        b_out = b_out * b_silu
    if NORM:
        b_weight = tl.load(p_weight + o_col, mask=m_col, other=0.0, eviction_policy="evict_last")
        scale = tl.rsqrt(tl.sum(b_out * b_out, 1, keep_dims=True) / GROUP + eps)
        b_out = b_out * scale * b_weight
    if NORM_FIRST:
        b_out = b_out * b_silu
    tl.store(p_out + i_row * out_stride + o_col, b_out.to(p_out.dtype.element_ty), mask=m_col)


def gated_norm(
    y: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    group_size: int,
    eps: float,
    dtype: torch.dtype | None = None,
    norm_first: bool = False,
    gate_scale: float = 1.0,
) -> Tensor:
    """Like the reference. Rows of y and of the gate may have any stride; their last dimension is contiguous. No host
    sync."""
    rows, channels = y.shape
    assert y.stride(1) == 1 and gate.stride(1) == 1 and channels % group_size == 0
    out = torch.empty(rows, channels, dtype=dtype or gate.dtype, device=y.device)
    groups, block = channels // group_size, triton.next_power_of_2(group_size)
    many = min(max(1, ELEMENTS // block), triton.next_power_of_2(groups))
    launch(
        _gated_norm_kernel,
        (rows, triton.cdiv(groups, many)),
        p_y=y,
        p_gate=gate,
        p_weight=y if weight is None else weight,
        p_out=out,
        y_stride=y.stride(0),
        gate_stride=gate.stride(0),
        out_stride=channels,
        eps=eps,
        gate_scale=gate_scale,
        groups=groups,
        GROUP=group_size,
        BLOCK=block,
        MANY=many,
        NORM=weight is not None,
        NORM_FIRST=norm_first,
        num_warps=max(1, min(8, block * many // 512)),
    )
    return out
