"""Parts of the way back from a GGUF file's tensors to published weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.linear import Quantised, concatenate

Weight = Tensor | Quantised
Make = Callable[..., Weight]
"""Makes a weight from the tensors of a file, each in torch's order of dimensions. It is also called with tensors on the
`meta` device, to learn the shape of the result."""


class Inverse(NamedTuple):
    """A change of numbers by llama.cpp's converter, both ways, in float32."""

    back: Callable[[Tensor], Tensor]
    forward: Callable[[Tensor], Tensor]
    tolerance: float = 0.0
    """Largest relative difference between results of `forward` that are the same: it may be computed elsewhere."""


Names = Mapping[str, str | tuple[str, Inverse | None, Make | None]]
"""Name in a file -> published name, or that with the change of numbers and what makes the weight."""

PLUS_ONE = Inverse(lambda stored: stored - 1, lambda weight: weight + 1)
"""Norms that are published with their weight minus 1 are stored with the whole weight."""
MINUS_EXP = Inverse(lambda stored: torch.log(-stored), lambda weight: -torch.exp(weight), 2.0**-21)
"""The decay of a recurrent state is published as the logarithm of its negative (`A_log`)."""


def each(weight: Weight, change: Callable[[Tensor], Tensor]) -> Weight:
    """Applies `change`, which affects no inputs, to a weight or to each tensor of a quantised one."""
    return weight.map(change) if isinstance(weight, Quantised) else change(weight)


def stacked_rows(*weights: Weight) -> Weight:
    """The rows of the first weight, then those of the next: `[..., n, k]` each."""
    return concatenate(weights)


def convolution(weight: Weight) -> Tensor:
    """Taps of each channel `[c, t]` -> `[c, 1, t]`, as torch's `Conv1d` has them."""
    assert isinstance(weight, Tensor)
    return weight.reshape(weight.shape[0], 1, weight.shape[-1])


def vector(weight: Tensor) -> Tensor:
    """All numbers in one dimension."""
    return weight.reshape(-1)


def row(weight: Tensor) -> Tensor:
    """One output `[k]` or `[1, k]` -> `[1, k]`."""
    return weight.reshape(1, -1)


def grouped(weight: Weight, inner: int, outer: int, width: int, first: int = 0) -> Weight:
    """Rows after the first ones, in blocks of `width` rows: `inner` blocks of each of `outer` groups, stored one of
    each group after the other, become group after group."""

    def change(part: Tensor) -> Tensor:
        kept, moved = part[:first], part[first:]
        moved = moved.unflatten(0, (inner, outer, width)).transpose(0, 1).flatten(0, 2)
        return torch.cat((kept, moved)) if first else moved

    return each(weight, change)


def grouped_inputs(weight: Weight, inner: int, outer: int, width: int) -> Weight:
    """`grouped` for inputs: the last dimension. A quantised weight needs whole groups of inputs in each block."""

    def change(part: Tensor) -> Tensor:
        return part.unflatten(-1, (inner, outer, part.shape[-1] // (inner * outer))).transpose(-2, -3).flatten(-3)

    assert not isinstance(weight, Quantised) or width % weight.scale_group == 0
    return each(weight, change)


def unpaired(weight: Weight, heads: int) -> Weight:
    """Rows of each head whose halves alternate (first, half + 1, second, ...) -> the first half, then the second. The
    converter lets them alternate for llama.cpp's rotary positions."""
    return each(weight, lambda part: part.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2))


MAMBA2: Names = {
    "ssm_in.weight": "in_proj.weight",
    "ssm_in.bias": "in_proj.bias",
    "ssm_conv1d.weight": ("conv1d.weight", None, convolution),
    "ssm_conv1d.bias": "conv1d.bias",
    "ssm_dt.bias": ("dt_bias", None, vector),
    "ssm_a": ("A_log", MINUS_EXP, vector),
    "ssm_d": ("D", None, vector),
    "ssm_norm.weight": ("norm.weight", None, vector),
    "ssm_out.weight": "out_proj.weight",
    "ssm_out.bias": "out_proj.bias",
}
"""Tensors of a Mamba-2 layer -> published names, the change of numbers, and what makes the weight."""
