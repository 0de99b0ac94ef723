"""Products of int8 rows with int8 weights, on CPUs: `--activations int8`.

Each row of activations is rounded to 127 steps of its own scale, its largest magnitude / 127, like compressed-tensors'
dynamic symmetric "per token" activations. Sums are integers, so that their order is of no importance, and

    y = (sum * scale of the row) * scale of the output        in float32.

Results differ from those with rows of 16 bits, so this must be requested. Here is the reference; the compiled product
(`BYTES` in kernels/native) has the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.linear.quantised import Quantised

STEPS = 127.0
"""Steps from 0 to a row's largest magnitude."""
SMALLEST = 2.0**-119
"""The least value that counts as a row's largest: a scale is never 0, and its reciprocal is finite."""


def to_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """`[rows, in]` -> int8 `[rows, in]` and float32 scales `[rows, 1]`; x is about their product. The scale of a row
    with a number that is not finite is NaN."""
    wide = x.float()
    finite = torch.isfinite(wide)
    largest = wide.where(finite, 0).abs().amax(1, keepdim=True).clamp(min=SMALLEST)
    steps = torch.full_like(largest, STEPS)  # torch divides a plain number by way of a rounded reciprocal
    values = (wide.where(finite, 0) * (steps / largest)).round_()
    scale = (largest / steps).where(finite.all(1, keepdim=True), torch.nan)
    return values.to(torch.int8), scale


def int8_linear(x: Tensor, weight: Quantised, bias: Tensor | None) -> Tensor:
    """`[rows, in]` -> `[rows, out]` in x's dtype. Expands the weight for each call."""
    values, scale = to_int8(x)
    sums = values.double() @ weight.values.double().t()  # integers far below 2^53: exact
    y = (sums.float() * scale) * weight.scale
    return (y if bias is None else y + bias.float()).to(x.dtype)


def check_int8_products(device: torch.device) -> None:
    """`ValueError` if int8 rows cannot be multiplied: not on a CPU."""
    if device.type != "cpu":
        raise ValueError(f"activations int8 need a CPU, and the device is {device}; unset, they stay in 16 bits")
