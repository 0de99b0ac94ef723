"""Quantised weights of linear layers, as published files store them; the maths is in README.md."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.host_memory import drop_pages
from kernels.native.structs import GROUP
from kernels.weight_forms import kind_and_group

KINDS = ("int8", "int4", "fp8", "nvfp4")
MIDDLE = {"int8": 128, "int4": 8}
"""The zero points of integers that have no others."""
INTEGERS = tuple(MIDDLE)
NVFP4_GROUP = 16
"""Inputs that share a scale in nvfp4."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the 4-bit floating type by their code; bit 3 is the sign."""
TENSORS = ("values", "scale", "zeros", "outer", "order")
"""Fields of a `Quantised` that are tensors."""


@dataclass(frozen=True)
class Quantised:
    """Rows of a weight `[..., n, k]` as small values and scales. `ValueError` for shapes and dtypes that do not fit.

    int8: `values` int8 `[..., n, k]`; `scale` float32 `[..., n, ceil(k / group)]`: w = (value + 128 - zero) * scale of
    its row and group. Zeros are 128, or `zeros`.
    int4: `values` uint8 `[..., n, ceil(k / 2)]`, two values of 0 to 15 per byte, even inputs in the low half; `scale`
    as of int8: w = (value - zero) * scale of its row and group. Zeros are 8, or `zeros`.
    fp8: `values` float8_e4m3fn `[..., n, k]`, `scale` as of int8: w = value * scale of its row and group.
    nvfp4: `values` as of int4, e2m1 codes; `scale` float8_e4m3fn `[..., n, ceil(k / 16)]`: w = value * scale * outer of
    its row, or w = value * scale / outer where `divided`.
    """

    kind: str
    values: Tensor
    scale: Tensor
    in_features: int
    group: int = GROUP
    """Inputs that share a scale, but for nvfp4; a scale for a whole row has a group of `in_features`."""
    zeros: Tensor | None = None
    """int8, int4: uint8, of the scale's shape; of int4 0 to 16."""
    outer: Tensor | None = None
    """nvfp4: float32 `[..., n]`."""
    divided: bool = False
    order: Tensor | None = None
    """int8, int4: int64 `[..., k]`: column j of the values is input `order[j]`; None: inputs are in order."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind of weights {self.kind!r} is not one of {', '.join(KINDS)}")
        if self.group < 1:
            raise ValueError(f"a group must have at least 1 input, not {self.group}")
        rows, inner = tuple(self.values.shape[:-1]), self.in_features
        halved, groups = (*rows, -(-inner // 2)), (*rows, -(-inner // self.scale_group))
        expected: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "int8": {"values": (torch.int8, (*rows, inner)), "scale": (torch.float32, groups)},
            "int4": {"values": (torch.uint8, halved), "scale": (torch.float32, groups)},
            "fp8": {"values": (torch.float8_e4m3fn, (*rows, inner)), "scale": (torch.float32, groups)},
            "nvfp4": {"values": (torch.uint8, halved), "scale": (torch.float8_e4m3fn, groups)},
        }[self.kind]
        if self.kind == "nvfp4":
            expected["outer"] = torch.float32, rows
        if self.kind in INTEGERS and self.zeros is not None:
            expected["zeros"] = torch.uint8, groups
        if self.kind in INTEGERS and self.order is not None:
            expected["order"] = torch.int64, (*rows[:-1], inner)
        for name in TENSORS:
            tensor, wanted = getattr(self, name), expected.get(name)
            if tensor is None and wanted is None:
                continue
            if tensor is None or wanted is None or (tensor.dtype, tuple(tensor.shape)) != wanted:
                found = "missing" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
                want = "nothing" if wanted is None else f"{wanted[0]} {wanted[1]}"
                raise ValueError(f"{name} of an {self.kind} weight: {found}, but must be {want}")

    @property
    def scale_group(self) -> int:
        """Inputs that share a scale."""
        return NVFP4_GROUP if self.kind == "nvfp4" else self.group

    @property
    def in_groups(self) -> bool:
        """Whether a row has several scales."""
        return self.scale_group < self.in_features

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.values.shape[:-1], self.in_features))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def __getitem__(self, index: int) -> Quantised:
        return self._each(lambda tensor, _: tensor[index])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that this weight has, in the order of `TENSORS`."""
        return tuple(tensor for name in TENSORS if (tensor := getattr(self, name)) is not None)

    def rows(self, index: Tensor | slice) -> Quantised:
        """Rows of a weight `[n, k]`: copies for an int64 `index` of any length, views for a slice."""
        return self._each(lambda tensor, has_rows: tensor[index] if has_rows else tensor)

    def row_part(self, place: int, parts: int, groups: int = 1, count: int = 1) -> Quantised:
        """Part `place` of `parts` equal parts of the rows, or of each of `groups` equal groups of rows, and the next
        `count - 1` parts; a view if possible."""
        row = self.values.dim() - 2
        of = place, parts, groups, count
        return self._each(
            lambda tensor, has_rows: row_part(tensor, *of, dim=row - tensor.dim()) if has_rows else tensor
        )

    def in_shape(self, rows: Sequence[int]) -> Quantised:
        """Reshapes a weight `[n, k]`, which has no input order, to `[*rows, k]`."""
        assert self.order is None
        return self._each(lambda tensor, _: tensor.unflatten(0, tuple(rows)))

    def to(self, device: torch.device | str) -> Quantised:
        return self._each(lambda tensor, _: tensor.to(device))

    def contiguous(self) -> Quantised:
        return self._each(lambda tensor, _: tensor.contiguous())

    def map(self, change: Callable[[Tensor], Tensor]) -> Quantised:
        """Applies `change` to each tensor."""
        return self._each(lambda tensor, _: change(tensor))

    def _each(self, change: Callable[[Tensor, bool], Tensor]) -> Quantised:
        """Applies `change` to each tensor; its second argument tells whether the tensor has a dimension of rows."""
        tensors = {name: getattr(self, name) for name in TENSORS}
        found: dict[str, Any] = {
            name: change(tensor, name != "order") for name, tensor in tensors.items() if tensor is not None
        }
        return replace(self, **found)

    def integers(self) -> Tensor:
        """The values of an int8 or int4 weight: int8 `[..., n, k]`, in the order of the columns, as if zero points were
        `MIDDLE`."""
        if self.kind == "int8":
            return self.values
        return unpack_nibbles(self.values)[..., : self.in_features].to(torch.int8) - 8

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """`[..., n, k]`: computed in float32 from left to right, as in the class's formulas, then rounded to
        `dtype`."""
        if self.kind == "fp8":
            return (self.values.float() * self._by_input(self.scale)).to(dtype)
        if self.kind == "nvfp4":
            assert self.outer is not None
            codes = unpack_nibbles(self.values)[..., : self.in_features]
            exact, outer = (
                _numbers(codes.device)[codes.long()] * self._by_input(self.scale.float()),
                self.outer[..., None],
            )
            return (exact / outer if self.divided else exact * outer).to(dtype)
        numbers = self.integers().float()
        if self.zeros is not None:
            numbers -= self._by_input(self.zeros.float() - MIDDLE[self.kind])
        found = numbers * self._by_input(self.scale)
        if self.order is not None:
            found = torch.empty_like(found).scatter_(-1, self.order[..., None, :].expand_as(found), found)
        return found.to(dtype)

    def _by_input(self, groups: Tensor) -> Tensor:
        """`[..., n, groups]` -> `[..., n, k]`; with a single group `[..., n, 1]`."""
        if groups.shape[-1] == 1:
            return groups
        return groups.repeat_interleave(self.scale_group, -1)[..., : self.in_features]


@functools.cache
def _numbers(device: torch.device) -> Tensor:
    """`[16]`: the value of each e2m1 code. Cached, because a copy to a GPU cannot be captured in a graph."""
    return torch.tensor([*E2M1, *(-value for value in E2M1)], device=device)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """uint8 `[..., n]` -> `[..., 2 n]`: both halves of each byte, the low one first."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Codes 0 to 15 `[..., k]` -> uint8 `[..., ceil(k / 2)]`, contiguous, even places in the low halves."""
    pairs = F.pad(codes.to(torch.uint8), (0, codes.shape[-1] % 2))
    return (pairs[..., 0::2] | pairs[..., 1::2] << 4).contiguous()


def check_groups(weight: Quantised) -> None:
    """Raises `ValueError` if the products on a GPU do not support the weight's groups of inputs, each of which must
    fill whole products of 16 inputs."""
    group, inner = weight.scale_group, weight.in_features
    if group % 16 and group < inner:
        raise ValueError(
            f"a weight with {inner} inputs in groups of {group} inputs has no kernel on a GPU: groups must be a "
            f"multiple of 16 inputs, or contain all inputs"
        )


AnyWeight = Tensor | Quantised


def row_part(tensor: Tensor, place: int, parts: int, groups: int = 1, count: int = 1, *, dim: int) -> Tensor:
    """Along a negative `dim`: part `place` of `parts` equal parts of each of `groups` equal groups, and the next
    `count - 1` parts, group after group. Aliases the tensor if there is one group."""
    split = tensor.unflatten(dim, (groups, parts, -1)).narrow(dim - 1, place, count)
    return split.flatten(dim - 2, dim)


def quantised_bytes(shape: Sequence[int], form: str) -> int:
    """Bytes of the result of `quantise` for a weight of this shape."""
    (*rows, inner), (kind, group) = shape, kind_and_group(form)
    pairs, groups = -(-inner // 2), -(-inner // (group or inner))
    row = {
        "int8": inner + 4 * groups,
        "int4": pairs + 4 * groups,
        "fp8": inner + 4,
        "nvfp4": pairs + -(-inner // NVFP4_GROUP) + 4,
    }[kind]
    return math.prod(rows) * row


def concatenate(parts: Sequence[Tensor | Quantised]) -> Tensor | Quantised:
    """Concatenates weights of the same input along the rows. `ValueError` unless they are `alike`."""
    plain = [part for part in parts if isinstance(part, Tensor)]
    if len(plain) == len(parts):
        return _joined(plain, plain[0].dim() - 2)
    quantised = [part for part in parts if isinstance(part, Quantised)]
    if not alike(parts):
        raise ValueError("weights that belong together are not all quantised in the same way")
    first, tensors = quantised[0], dict[str, Any]()
    for name in TENSORS:
        if name != "order" and getattr(first, name) is not None:
            tensors[name] = _joined([getattr(part, name) for part in quantised], first.values.dim() - 2)
    return replace(first, **tensors)


def _joined(tensors: Sequence[Tensor], row: int) -> Tensor:
    joined = torch.cat(tuple(tensors), row)
    drop_pages(*tensors)
    return joined


def alike(parts: Sequence[Tensor | Quantised]) -> bool:
    """Whether weights of the same input can be concatenated: all plain, or all of one kind, group and order."""
    quantised = [part for part in parts if isinstance(part, Quantised)]
    if not quantised:
        return True
    return len(quantised) == len(parts) and all(_same(quantised[0], part) for part in quantised[1:])


def _same(one: Quantised, other: Quantised) -> bool:
    """Whether two weights are stored in the same way, with the same order of inputs."""
    if any((getattr(one, name) is None) != (getattr(other, name) is None) for name in TENSORS):
        return False
    if one.order is not None and other.order is not None and not torch.equal(one.order, other.order):
        return False
    how = [(part.kind, part.scale_group, part.divided, part.in_features) for part in (one, other)]
    return how[0] == how[1]
