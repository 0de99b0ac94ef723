"""RMS norm; the maths is in README.md."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_ROWS = 256


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """`1 / sqrt(mean(x^2) + eps)` over the last dimension (kept with size 1), float32."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """`[rows, d]` -> `[rows, d]` in `dtype` (default: x's). `weight`: `[d]` float32; computed in float32.

    Many rows are processed in blocks that stay in the cache.
    """
    dtype = dtype or x.dtype
    if x.shape[0] <= BLOCK_ROWS:
        return (x * inverse_rms(x, eps)).mul_(weight).to(dtype)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    for part, result in zip(x.split(BLOCK_ROWS), out.split(BLOCK_ROWS), strict=True):
        result.copy_((part * inverse_rms(part, eps)).mul_(weight))
    return out


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """`x += delta` in place (rounded to x's dtype), then `rms_norm` of the sum."""
    x += delta
    return rms_norm(x, weight, eps, dtype)
