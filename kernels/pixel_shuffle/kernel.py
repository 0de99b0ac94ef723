"""Space to depth with the norms after it, in Triton; see README.md.

R tower rows of D features, N image tokens, M x M patches in each; E = M * M * D.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import launch


@triton.jit
def _shuffle_norm(  # type: ignore[no-untyped-def]
    p_x,  # [R, D]
    p_rows,  # [N, M * M]
    p_final_weight,  # [D]
    p_final_bias,  # [D]
    p_weight,  # [E]
    p_out,  # [N, E]
    x_row,
    final_eps,
    eps,
    MERGED: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FINAL: tl.constexpr,
    NORM: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    o_m = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    m = (o_m < MERGED)[:, None] & m_d[None, :]
    row = tl.load(p_rows + i_token * MERGED + o_m, mask=o_m < MERGED, other=0).to(tl.int64)
    x = tl.load(p_x + row[:, None] * x_row + o_d[None, :], mask=m, other=0.0).to(tl.float32)
    if FINAL:
        centred = tl.where(m, x - (tl.sum(x, 1) / D)[:, None], 0.0)
        scale = tl.rsqrt(tl.sum(centred * centred, 1) / D + final_eps)
        weight = tl.load(p_final_weight + o_d, mask=m_d, other=0.0).to(tl.float32)
        bias = tl.load(p_final_bias + o_d, mask=m_d, other=0.0).to(tl.float32)
        x = tl.where(m, centred * scale[:, None] * weight[None, :] + bias[None, :], 0.0)
    o_e = o_m[:, None] * D + o_d[None, :]
    if NORM:
        scale = tl.rsqrt(tl.sum(tl.sum(x * x, 1), 0) / (MERGED * D) + eps)
        weight = tl.load(p_weight + o_e, mask=m, other=0.0).to(tl.float32)
        x = x * scale * weight
    tl.store(p_out + i_token * (MERGED * D) + o_e, x.to(p_out.dtype.element_ty), mask=m)


def shuffle_norm(
    x_RD: Tensor,
    token_rows_NM: Tensor,
    weight_E: Tensor | None,
    eps: float,
    final: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:
    """Like the reference, with one rounding at the end. Reads each tower row once. No host sync."""
    tokens, merged = token_rows_NM.shape
    width = x_RD.shape[1]
    assert x_RD.stride(1) == 1 and token_rows_NM.is_contiguous() and (weight_E is None or weight_E.is_contiguous())
    out = torch.empty(tokens, merged * width, dtype=x_RD.dtype, device=x_RD.device)
    final_weight, final_bias, final_eps = final or (x_RD, x_RD, 0.0)
    launch(
        _shuffle_norm,
        (tokens,),
        p_x=x_RD,
        p_rows=token_rows_NM,
        p_final_weight=final_weight,
        p_final_bias=final_bias,
        p_weight=x_RD if weight_E is None else weight_E,
        p_out=out,
        x_row=x_RD.stride(0),
        final_eps=final_eps,
        eps=eps,
        MERGED=merged,
        D=width,
        BLOCK_M=triton.next_power_of_2(merged),
        BLOCK_D=triton.next_power_of_2(width),
        FINAL=final is not None,
        NORM=weight_E is not None,
        num_warps=8,
    )
    return out
