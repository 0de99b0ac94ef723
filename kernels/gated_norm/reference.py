"""Gate, then RMS norm over groups of channels; the maths is in README.md."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def gated_norm(
    y: Tensor, gate: Tensor, weight: Tensor, group_size: int, eps: float, dtype: torch.dtype | None = None
) -> Tensor:
    """`y * silu(gate)`, normalised over each group of `group_size` channels, times `weight`.

    y, gate: `[rows, channels]` of any float dtype; weight: `[channels]` float32. Computed in float32, returned in `dtype`
    (default: the gate's). `group_size` divides the channels.
    """
    rows, channels = y.shape
    value = (y.float() * F.silu(gate.float())).view(rows, channels // group_size, group_size)
    value = F.rms_norm(value, (group_size,), None, eps).view(rows, channels)
    return value.mul_(weight).to(dtype or gate.dtype)
