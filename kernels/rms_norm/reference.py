"""RMS norm; the maths is in README.md."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """`[rows, d]` -> `[rows, d]` in `dtype` (default: x's). `weight` `[d]` float32; everything is computed in float32."""
    return F.rms_norm(x.float(), (x.shape[-1],), weight, eps).to(dtype or x.dtype)
