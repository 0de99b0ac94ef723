"""Reads weights of a tower: plain ones in its dtype, quantised ones packed where a product can take them."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.linear import AnyWeight, Linear, Quantised
from kernels.native import Kind


def plain(weight: AnyWeight) -> Tensor:
    """The tensor, expanded to float32 if it is quantised."""
    return weight.dequantise() if isinstance(weight, Quantised) else weight


def tower_linear(
    weight: AnyWeight, bias: Tensor | None, *, dtype: torch.dtype, device: torch.device, compiled: bool
) -> Linear:
    """A linear layer. fp8, nvfp4 and grouped int4 weights stay packed if `compiled` code multiplies them with plain
    rows."""
    if isinstance(weight, Quantised) and compiled:
        linear = Linear(weight, bias, dtype=dtype)
        packed = linear.packed
        if packed is not None and packed.kind in (Kind.BF16, Kind.F32) and packed.order is None:
            return linear
    return Linear(plain(weight).to(device, dtype), bias, compiled=compiled)
