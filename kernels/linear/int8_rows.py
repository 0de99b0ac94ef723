"""Products of int8 rows with int8 and int4 weights, on CPUs: `--activations int8`.

Each row of activations is rounded to 127 steps of its own scale, its largest magnitude / 127, like compressed-tensors'
dynamic symmetric "per token" activations. Sums of products are integers, so that their order is of no importance, and

    int8: y = (sum * scale of the row) * scale of the output
    int4: total = fma(sum of the group, scale of the group and output, total), group after group;
          y = total * scale of the row

in float32. Results differ from those with rows of 16 bits, so this must be requested. Here is the reference; the
compiled products (`BYTES` and `SUMMED_BYTES` in kernels/native) have the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.linear.quantised import Quantised

INT8_ROWS_OF = ("int8", "int4")
"""Kinds of weights that such rows are multiplied with."""
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
    rows = x if weight.order is None else x.index_select(1, weight.order)
    values, scale = to_int8(rows)
    if weight.kind == "int4":
        y = _sum_of_groups(values, weight) * scale
    else:
        sums = values.double() @ weight.values.double().t()  # integers far below 2^53: exact
        y = (sums.float() * scale) * weight.scale
    return (y if bias is None else y + bias.float()).to(x.dtype)


def _sum_of_groups(values: Tensor, weight: Quantised) -> Tensor:
    """`[rows, out]` float32: the scaled sums of an int4 weight's groups, with one rounding for each group."""
    numbers = weight.integers().double()
    total = torch.zeros(values.shape[0], weight.shape[0])
    for index, begin in enumerate(range(0, weight.in_features, weight.group)):
        inputs = slice(begin, begin + weight.group)
        of_group = values[:, inputs].double()
        sums = of_group @ numbers[:, inputs].t()
        if weight.zeros is not None:
            sums -= of_group.sum(1, keepdim=True) * (weight.zeros[:, index].double() - 8)
        total = _fused(sums.float(), weight.scale[:, index], total)
    return total


def _fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c in float32, rounded once: the product is exact in float64, and the sum is rounded to odd there."""
    product, wide = a.double() * b.double(), c.double()
    total = product + wide
    part = total - product
    error = (product - (total - part)) + (wide - part)
    bits = total.view(torch.int64)
    inexact = (error != 0) & (bits % 2 == 0)
    away = (error > 0) == (total > 0)  # the exact sum is further from zero
    return torch.where(inexact, torch.where(away, bits + 1, bits - 1), bits).view(torch.float64).float()


def check_int8_products(device: torch.device) -> None:
    """`ValueError` if int8 rows cannot be multiplied: not on a CPU."""
    if device.type != "cpu":
        raise ValueError(f"activations int8 need a CPU, and the device is {device}; unset, they stay in 16 bits")
