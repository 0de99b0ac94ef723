"""Gate and RMS norm over groups of channels, in either order; the maths is in README.md."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.rms_norm.reference import BLOCK_ROWS, inverse_rms


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
    """`y * silu(gate_scale * gate)`, normalised over each group of `group_size` channels, times `weight`; with
    `norm_first`, y normalised over each group, times `weight` and `silu(gate_scale * gate)`. Without a `weight` there
    is no norm.

    y, gate: `[rows, channels]` of any float dtype; weight: `[channels]` float32. Computed in float32, returned in
    `dtype` (default: the gate's). `group_size` divides the channels. Many rows are processed in blocks that stay in the
    cache.
    """
    dtype = dtype or gate.dtype

    def work(y: Tensor, gate: Tensor) -> Tensor:
        scaled = gate if gate_scale == 1.0 else gate.float() * gate_scale
        if weight is None:
            return F.silu(scaled.float()).mul_(y)
        return (_norm_gated if norm_first else _gated_norm)(y, scaled, weight, group_size, eps)

    if y.shape[0] <= BLOCK_ROWS:
        return work(y, gate).to(dtype)
    out = torch.empty(y.shape, dtype=dtype, device=y.device)
    parts = zip(y.split(BLOCK_ROWS), gate.split(BLOCK_ROWS), out.split(BLOCK_ROWS), strict=True)
    for value, gating, result in parts:
        result.copy_(work(value, gating))
    return out


def _gated_norm(y: Tensor, gate: Tensor, weight: Tensor, group_size: int, eps: float) -> Tensor:
    value = F.silu(gate.float(), inplace=gate.dtype != torch.float32).mul(y)
    grouped = value.view(y.shape[0], -1, group_size)
    grouped.mul_(inverse_rms(grouped, eps))
    return value.mul_(weight)


def _norm_gated(y: Tensor, gate: Tensor, weight: Tensor, group_size: int, eps: float) -> Tensor:
    grouped = y.float().view(y.shape[0], -1, group_size)
    value = (grouped * inverse_rms(grouped, eps)).view(y.shape)
    return value.mul_(weight).mul_(F.silu(gate.float()))
