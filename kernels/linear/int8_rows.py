"""Products of int8 rows with int8 and int4 weights, on CPUs: `--activations int8`.

Each row of activations is rounded to integers from -127 to 127 with its own scale, its largest magnitude / 127, like
compressed-tensors' dynamic symmetric "per token" activations. Sums of products are integers, so that their order does
not matter. In float32,

    int8 with a scale for each output: y = (sum * scale of the row) * scale of the output
    in groups, and int4: total = fma(sum of the group, scale of the group and output, total), group after group;
          y = total * scale of the row

Results differ from those with rows of 16 bits, so this must be requested. This is the reference; the results of the
compiled products (`BYTES` and `SUMMED_BYTES` in kernels/native) are bitwise equal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.linear.quantised import INTEGERS, MIDDLE, AnyWeight, Quantised
from kernels.native.structs import SUMMED

STEPS = 127.0
"""Steps from 0 to a row's largest magnitude."""
SMALLEST = 2.0**-119
"""Lower bound of a row's largest magnitude, so that its scale is never 0 and the reciprocal is finite."""


def takes_int8_rows(weight: AnyWeight) -> bool:
    """Whether int8 rows are multiplied with a weight: one of integers, with scales for rows or for groups of a multiple
    of `SUMMED` inputs. Others are multiplied with rows of 16 bits."""
    return isinstance(weight, Quantised) and weight.kind in INTEGERS and has_whole_sums(weight.group, weight.shape[-1])


def has_whole_sums(group: int, inputs: int) -> bool:
    """Whether products of bytes can be summed for groups of `group` inputs, `SUMMED` at a time."""
    return group % SUMMED == 0 or group >= inputs


def to_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """`[rows, in]` -> int8 `[rows, in]` and float32 scales `[rows, 1]`; x is approximately their product. The scale of
    a row with an element that is not finite is NaN."""
    wide = x.float()
    finite = torch.isfinite(wide)
    largest = wide.where(finite, 0).abs().amax(1, keepdim=True).clamp(min=SMALLEST)
    steps = torch.full_like(largest, STEPS)  # a tensor: torch divides by a Python number with a rounded reciprocal
    values = (wide.where(finite, 0) * (steps / largest)).round_()
    scale = (largest / steps).where(finite.all(1, keepdim=True), torch.nan)
    return values.to(torch.int8), scale


def int8_linear(x: Tensor, weight: Quantised, bias: Tensor | None) -> Tensor:
    """`[rows, in]` -> `[rows, out]` in x's dtype. Expands the weight for each call."""
    rows = x if weight.order is None else x.index_select(1, weight.order)
    values, scale = to_int8(rows)
    if is_summed(weight):
        y = _sum_of_groups(values, weight) * scale
    else:
        sums = values.double() @ weight.values.double().t()  # integers far below 2^53: exact
        y = (sums.float() * scale) * weight.scale[:, 0]
    return (y if bias is None else y + bias.float()).to(x.dtype)


def is_summed(weight: Quantised) -> bool:
    """Whether a product with int8 rows is a sum of scaled sums of groups, even if there is only one group."""
    return weight.kind == "int4" or weight.in_groups or weight.zeros is not None


def _sum_of_groups(values: Tensor, weight: Quantised) -> Tensor:
    """`[rows, out]` float32: the scaled sums of a weight's groups, with one rounding for each group."""
    numbers = weight.integers().double()
    total = torch.zeros(values.shape[0], weight.shape[0])
    for index, begin in enumerate(range(0, weight.in_features, weight.group)):
        inputs = slice(begin, begin + weight.group)
        of_group = values[:, inputs].double()
        sums = of_group @ numbers[:, inputs].t()
        if weight.zeros is not None:
            sums -= of_group.sum(1, keepdim=True) * (weight.zeros[:, index].double() - MIDDLE[weight.kind])
        total = _fused(sums.float(), weight.scale[:, index], total)
    return total


def _fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c in float32, rounded once: in float64 the product is exact, and the sum is rounded to odd."""
    product, wide = a.double() * b.double(), c.double()
    total = product + wide
    part = total - product
    error = (product - (total - part)) + (wide - part)
    bits = total.view(torch.int64)
    inexact = (error != 0) & (bits % 2 == 0)
    away = (error > 0) == (total > 0)  # the exact sum is further from zero
    return torch.where(inexact, torch.where(away, bits + 1, bits - 1), bits).view(torch.float64).float()


def check_int8_products(device: torch.device) -> None:
    """Raises `ValueError` if the device is not a CPU: only CPUs have products of int8 rows."""
    if device.type != "cpu":
        raise ValueError(f"activations int8 needs a CPU, but the device is {device}; leave it unset for 16 bits")
