"""RMS norm in Triton; README.md has the maths, bytes and reasons for the configurations.

One program computes one row and keeps it in registers, so x is read once and the result written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import launch


@triton.jit
def _rms_norm_kernel(
    p_x,  # [rows, WIDTH]; with HAS_DELTA also written
    p_delta,  # [rows, WIDTH]
    p_weight,  # [WIDTH] float32
    p_out,  # [rows, WIDTH]
    x_stride,
    delta_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DELTA: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    o_col = tl.arange(0, BLOCK)
    m_col = o_col < WIDTH
    b_x = tl.load(p_x + i_row * x_stride + o_col, mask=m_col, other=0.0)
    b_weight = tl.load(p_weight + o_col, mask=m_col, other=0.0)
    if HAS_DELTA:
        b_delta = tl.load(p_delta + i_row * delta_stride + o_col, mask=m_col, other=0.0)
        # Rounded to the residual's dtype before the norm, as `x += delta` would.
        b_x = (b_x.to(tl.float32) + b_delta.to(tl.float32)).to(b_x.dtype)
        tl.store(p_x + i_row * x_stride + o_col, b_x, mask=m_col)
    b_v = b_x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(b_v * b_v, 0) / WIDTH + eps)
    b_out = b_v * scale * b_weight
    tl.store(p_out + i_row * WIDTH + o_col, b_out.to(p_out.dtype.element_ty), mask=m_col)


def _warps(block: int) -> int:
    """16 elements per thread: two 16-byte loads in bfloat16, and few enough registers for full occupancy."""
    return max(1, min(16, block // 512))


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """Like the reference. Rows may have any stride; the last dimension is contiguous. No host sync."""
    return _run(x, None, weight, eps, dtype)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """Like the reference: `x += delta` in place, and the norm of the sum, in one pass."""
    return _run(x, delta, weight, eps, dtype)


def _run(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype | None) -> Tensor:
    width = x.shape[-1]
    rows = x if x.dim() == 2 else x.view(-1, width)
    assert rows.stride(1) == 1 and (delta is None or delta.shape == x.shape and delta.stride(-1) == 1)
    out = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    block = triton.next_power_of_2(width)
    other = rows if delta is None else delta.view(-1, width)
    launch(
        _rms_norm_kernel,
        (rows.shape[0],),
        p_x=rows,
        p_delta=other,
        p_weight=weight,
        p_out=out,
        x_stride=rows.stride(0),
        delta_stride=other.stride(0),
        eps=eps,
        WIDTH=width,
        BLOCK=block,
        HAS_DELTA=delta is not None,
        num_warps=_warps(block),
    )
    return out
