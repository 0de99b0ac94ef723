"""Weights in 8 or 4 bits; the maths is in README.md."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.native.structs import GROUP

BITS = {"int8": 8, "int4": 4}
SCALES = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Fractions of the largest scale that are tried for int4."""


@dataclass(frozen=True)
class Quantised:
    """Rows of a weight `[..., n, k]` as small integers and scales.

    int8: `values` int8 `[..., n, k]`, `scale` float32 `[..., n]`: w = value * scale of its row.
    int4: `values` uint8 `[..., n, ceil(k / 2)]`, two values + 8 a byte, the even one in the low half; `scale` float32
    `[..., n, ceil(k / 128)]`: w = value * scale of its row and group. `ValueError` for anything else.
    """

    kind: str
    values: Tensor
    scale: Tensor
    in_features: int

    def __post_init__(self) -> None:
        if self.kind not in BITS:
            raise ValueError(f"weights {self.kind!r} is not one of {', '.join(BITS)}")
        rows, inner = self.values.shape[:-1], self.in_features
        expected = {
            "int8": ((torch.int8, (*rows, inner)), (torch.float32, tuple(rows))),
            "int4": ((torch.uint8, (*rows, -(-inner // 2))), (torch.float32, (*rows, -(-inner // GROUP)))),
        }[self.kind]
        for name, tensor, (dtype, shape) in zip(("values", "scale"), (self.values, self.scale), expected, strict=True):
            if tensor.dtype != dtype or tensor.shape != shape:
                found = f"{tensor.dtype} {tuple(tensor.shape)}"
                raise ValueError(f"the {name} of an {self.kind} weight are {found}, not {dtype} {shape}")

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.values.shape[:-1], self.in_features))

    def __getitem__(self, index: int) -> Quantised:
        return Quantised(self.kind, self.values[index], self.scale[index], self.in_features)

    def row_part(self, place: int, parts: int, groups: int = 1) -> Quantised:
        """One of so many equal parts of the rows, or of each of their equal groups; aliases this one where it can."""
        values = row_part(self.values, place, parts, groups, -2)
        scale = row_part(self.scale, place, parts, groups, -1 if self.kind == "int8" else -2)
        return Quantised(self.kind, values, scale, self.in_features)

    def to(self, device: torch.device | str) -> Quantised:
        return Quantised(self.kind, self.values.to(device), self.scale.to(device), self.in_features)

    def integers(self) -> Tensor:
        """int8 `[..., n, k]`."""
        if self.kind == "int8":
            return self.values
        pairs = torch.stack((self.values & 15, self.values >> 4), -1).flatten(-2)
        return pairs[..., : self.in_features].to(torch.int8) - 8

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """`[..., n, k]`."""
        scale = self.scale[..., None]
        if self.kind == "int4":
            scale = self.scale.repeat_interleave(GROUP, -1)[..., : self.in_features]
        return (self.integers() * scale).to(dtype)


def row_part(tensor: Tensor, place: int, parts: int, groups: int, dim: int) -> Tensor:
    """Along a negative `dim`: part `place` of `parts` equal parts of each of `groups` equal groups, group after group.
    Aliases the tensor where there is one group.
    """
    if groups == 1:
        return tensor.chunk(parts, dim)[place]
    split = tensor.unflatten(dim, (groups, parts, -1)).select(dim - 1, place)
    return split.flatten(dim - 1, dim)


def quantised_bytes(shape: Sequence[int], kind: str) -> int:
    """Of the values and scales that `quantise` makes of a weight of this shape."""
    *rows, inner = shape
    row = inner + 4 if kind == "int8" else -(-inner // 2) + 4 * -(-inner // GROUP)
    return math.prod(rows) * row


def quantise(weight: Tensor, kind: str) -> Quantised:
    """Nearest values on each row's (int8) or group's (int4) own grid. `ValueError` for another kind or an infinity."""
    if kind not in BITS:
        raise ValueError(f"weights {kind!r} is not one of {', '.join(BITS)}")
    weight = weight.detach().float()
    if not bool(torch.isfinite(weight).all()):
        raise ValueError(f"a weight of shape {tuple(weight.shape)} holds values that are not finite")
    inner = weight.shape[-1]
    if kind == "int8":
        scale = weight.abs().amax(-1) / 127
        values = (weight / _divisor(scale)[..., None]).round_().clamp_(-127, 127).to(torch.int8)
        return Quantised(kind, values, scale, inner)
    groups = F.pad(weight, (0, -inner % GROUP)).unflatten(-1, (-1, GROUP))
    steps, scale = _finest(groups)
    flat = F.pad(steps.flatten(-2)[..., :inner], (0, inner % 2)).add_(8).to(torch.uint8)
    return Quantised(kind, flat[..., 0::2] | flat[..., 1::2] << 4, scale, inner)


def _finest(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Values -8..7 and scale of each group: of some scales, the one with the least squared error.

    The first puts the value of largest magnitude at -8, whatever its sign, so that all 16 steps are in use. Smaller
    ones cut the ends off, which pays where few values are large.
    """
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))[..., 0]
    best_steps = torch.zeros_like(groups, dtype=torch.int8)
    best_scale = torch.zeros_like(largest)
    best_error = torch.full_like(largest, float("inf"))
    for factor in SCALES:
        scale = largest * (factor / -8)
        steps = (groups / _divisor(scale)[..., None]).round_().clamp_(-8, 7)
        error = (steps * scale[..., None]).sub_(groups).square_().sum(-1)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, scale, best_scale)
        best_steps = torch.where(better[..., None], steps.to(torch.int8), best_steps)
    return best_steps, best_scale


def _divisor(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, torch.ones((), dtype=scale.dtype), scale)


def concatenate(parts: Sequence[Tensor | Quantised]) -> Tensor | Quantised:
    """Weights of one input below one another. `ValueError` where plain and quantised ones meet."""
    return _joined(parts, torch.cat)


def stack(parts: Sequence[Tensor | Quantised]) -> Tensor | Quantised:
    """Weights of one shape in a new first dimension. `ValueError` where plain and quantised ones meet."""
    return _joined(parts, torch.stack)


def _joined(parts: Sequence[Tensor | Quantised], join: Callable[[list[Tensor]], Tensor]) -> Tensor | Quantised:
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if len(tensors) == len(parts):
        return join(tensors)
    quantised = [part for part in parts if isinstance(part, Quantised)]
    if len(quantised) < len(parts) or len({part.kind for part in quantised}) > 1:
        raise ValueError("weights that belong together are not all quantised in the same way")
    first = quantised[0]
    values, scale = join([p.values for p in quantised]), join([p.scale for p in quantised])
    return Quantised(first.kind, values, scale, first.in_features)
