"""The attention in compiled code (kernels/native/varlen.h), for CPUs with one of its instruction sets."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.native import Kind, NativeUnavailable, library
from kernels.native.structs import VarlenAttention
from kernels.varlen_attention.reference import check_offsets

KINDS = {torch.bfloat16: Kind.BF16, torch.float32: Kind.F32}


def takes(q_RHD: Tensor, k_RHD: Tensor, v_RHD: Tensor, scale: float) -> bool:
    """Whether this machine has compiled code and it supports these arguments: bfloat16 or float32, the same strides for
    all three tensors, contiguous features, and a positive scale."""
    strides = {x.stride() for x in (q_RHD, k_RHD, v_RHD)}
    if q_RHD.dtype not in KINDS or len(strides) > 1 or q_RHD.stride(2) != 1 or scale <= 0:
        return False
    try:
        library()
    except NativeUnavailable:
        return False
    return True


def varlen_attention(
    q_RHD: Tensor, k_RHD: Tensor, v_RHD: Tensor, cu_seqlens: Tensor, max_seqlen: int, *, scale: float
) -> Tensor:
    """Like the reference, for arguments that `takes` accepts."""
    rows, heads, width = q_RHD.shape
    check_offsets(cu_seqlens.tolist(), rows, max_seqlen)
    out_RHD = q_RHD.new_empty(rows, heads, width)
    bounds, bf16 = cu_seqlens.to(torch.int32).contiguous(), int(q_RHD.dtype == torch.bfloat16)
    attention = VarlenAttention(
        q=q_RHD.data_ptr(), k=k_RHD.data_ptr(), v=v_RHD.data_ptr(), out=out_RHD.data_ptr(),
        stride=q_RHD.stride(0), head_stride=q_RHD.stride(1), out_stride=heads * width,
        stored_bf16=bf16, out_bf16=bf16, kind=KINDS[q_RHD.dtype],
        heads=heads, group=heads // k_RHD.shape[1], width=width,
        sequences=bounds.shape[0] - 1, bounds=bounds.data_ptr(), scale=scale,
    )  # fmt: skip
    library().saccade_varlen_attention(ctypes.byref(attention), torch.get_num_threads())
    return out_RHD
