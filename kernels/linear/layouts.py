"""Weights in the layouts of the compiled kernels; kernels/native/README.md describes these."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.host_memory import drop_pages, weight_memory
from kernels.linear.quantised import NVFP4_GROUP, Quantised
from kernels.native import Kind, NativeUnavailable
from kernels.native.structs import GROUP, PANEL

STEPS = {Kind.F32: 1, Kind.BF16: 2, Kind.INT8: 16, Kind.INT4: GROUP, Kind.FP8: 8, Kind.NVFP4: 16, Kind.UINT4: 8}
"""Inputs are padded to multiples of these; for the last three kinds they must be multiples already."""
GATES = 16
"""In a gated weight, this many gates alternate with the outputs that they gate."""
MOST_INPUTS = 131_071
"""For int8 and int4: sums of products of bytes must fit 32 bits."""
PIECE = 1 << 20
"""Numbers of a weight that are converted at a time."""
LAID_OUT = ("data", "scale", "zeros", "outer")
"""Fields of a `Layout` that are tensors."""
MULTIPLIED = (torch.bfloat16, torch.float32)
"""Dtypes of plain weights and of rows."""


@dataclass(frozen=True)
class Layout:
    """A weight's tensors as the compiled code reads them."""

    stored: Kind
    """How the weight is stored."""
    rows: Kind
    """The form of the rows that it is multiplied with."""
    data: Tensor
    scale: Tensor | None = None
    zeros: Tensor | None = None
    outer: Tensor | None = None
    group: int = 0
    """Inputs that share a scale, for kinds that are summed group by group."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Those that there are; the first dimension of each is panels, or their rows."""
        return tuple(tensor for name in LAID_OUT if (tensor := getattr(self, name)) is not None)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def map(self, change: Callable[[Tensor], Tensor]) -> Layout:
        """Applies `change` to each tensor."""
        changed: dict[str, Any] = {
            name: change(tensor) for name in LAID_OUT if (tensor := getattr(self, name)) is not None
        }
        return replace(self, **changed)


def lay_out(weight: Tensor | Quantised, dtype: torch.dtype, *, gated: bool = False) -> Layout:
    """Converts a weight, a few panels at a time: besides the result, memory is used for one such piece.

    `dtype`: of the rows that an fp8, nvfp4 or grouped int4 weight is multiplied with, float32 or bfloat16. `gated`: the
    first half of the rows are gates of the second, and they are interleaved; not for plain float32. Columns keep their
    stored order; the caller must permute inputs. float32 is shared, others are copied. Raises NativeUnavailable if the
    compiled code has no product for the weight.
    """
    if isinstance(weight, Tensor) and weight.dtype != torch.bfloat16:
        assert not gated
        return _lay_out(weight, dtype)
    order = _Interleaved(weight.shape[0] // 2) if gated else None
    rows = weight.shape[0] if order is None else len(order.source)
    step, found = max(PIECE // max(weight.shape[1], 1) // PANEL, 1) * PANEL, None
    for begin in range(0, rows, step):
        piece = _rows(weight, slice(begin, begin + step)) if order is None else order.rows(weight, begin, begin + step)
        part = _lay_out(piece, dtype)
        if found is None:
            found = part.map(lambda tensor: _for_rows(tensor, min(step, rows), rows))
        for whole, tensor in zip(found.tensors, part.tensors, strict=True):
            first = begin * tensor.shape[0] // (-(-piece.shape[0] // PANEL) * PANEL)
            whole[first : first + tensor.shape[0]] = tensor
        if order is None:
            drop_pages(*_tensors(piece))
    assert found is not None, "a weight without rows"
    return found


def _for_rows(tensor: Tensor, rows: int, all_rows: int) -> Tensor:
    """Memory like that of a tensor for `rows` rows of a weight, in whole panels, for `all_rows`."""
    each = tensor.shape[0] // -(-rows // PANEL)
    return weight_memory((each * -(-all_rows // PANEL), *tensor.shape[1:]), tensor.dtype)


def _rows(weight: Tensor | Quantised, index: Tensor | slice) -> Tensor | Quantised:
    return weight.detach()[index] if isinstance(weight, Tensor) else weight.rows(index)


def _tensors(weight: Tensor | Quantised) -> tuple[Tensor, ...]:
    return (weight,) if isinstance(weight, Tensor) else weight.tensors


def _lay_out(weight: Tensor | Quantised, dtype: torch.dtype) -> Layout:
    stored = weight if isinstance(weight, Tensor) else weight.values
    if stored.device.type != "cpu" or (isinstance(weight, Tensor) and weight.dtype not in MULTIPLIED):
        raise NativeUnavailable(f"no compiled product for {stored.dtype} on {stored.device}")
    if isinstance(weight, Tensor):
        if weight.dtype == torch.bfloat16:
            return Layout(Kind.BF16, Kind.BF16, _panels(weight.detach(), STEPS[Kind.BF16], 2))
        return Layout(Kind.F32, Kind.F32, weight.detach().contiguous())
    if not _is_scaled(weight, dtype):
        if weight.in_features > MOST_INPUTS:
            raise NativeUnavailable(f"{weight.in_features} inputs are more than the {MOST_INPUTS} that 32 bits can sum")
        kind, pack = (Kind.INT8, _pack_int8) if weight.kind == "int8" else (Kind.INT4, _pack_int4)
        return Layout(kind, kind, *pack(weight))
    kind = {"fp8": Kind.FP8, "nvfp4": Kind.NVFP4, "int4": Kind.UINT4}[weight.kind]
    _check_scaled(weight, STEPS[kind], dtype)
    rows, group = Kind.F32 if dtype == torch.float32 else Kind.BF16, weight.scale_group
    if weight.kind == "fp8":
        return Layout(kind, rows, _pack_fp8(weight), _group_panels(weight.scale), group=group)
    if weight.kind == "nvfp4":
        assert weight.outer is not None
        outer = F.pad(1 / weight.outer if weight.divided else weight.outer, (0, -weight.shape[0] % PANEL)).contiguous()
        return Layout(kind, rows, _pack_nvfp4(weight), outer=outer, group=group)
    zeros = None if weight.zeros is None else _group_panels(weight.zeros.float())
    return Layout(kind, rows, _pack_nibbles(weight), _group_panels(weight.scale), zeros=zeros, group=group)


def _panels(weight: Tensor, step: int, together: int) -> Tensor:
    """`[n, k]` -> `[panels, k / together, 64, together]`, padded with zeros."""
    n, k = weight.shape
    padded = F.pad(weight, (0, -k % step, 0, -n % PANEL))
    return padded.view(-1, PANEL, padded.shape[1] // together, together).permute(0, 2, 1, 3).contiguous()


def _pack_int8(weight: Quantised) -> tuple[Tensor, Tensor]:
    """Unsigned bytes: values + 128."""
    data = _panels(weight.values, STEPS[Kind.INT8], 4).view(torch.uint8).bitwise_xor_(128)
    return data, F.pad(weight.scale, (0, -weight.shape[0] % PANEL)).contiguous()


def _pack_int4(weight: Quantised) -> tuple[Tensor, Tensor]:
    """Values + 8; each byte has the same input of an output in 0..31 (low half) and of one in 32..63 (high half)."""
    n, groups = weight.shape[0], math.ceil(weight.in_features / GROUP)
    panels = _panels(weight.integers(), GROUP, 4).add_(8).to(torch.uint8).flatten(2)
    data = panels[..., : 2 * PANEL] | panels[..., 2 * PANEL :] << 4
    scale = F.pad(weight.scale, (0, 0, 0, -n % PANEL)).view(-1, PANEL, groups).transpose(1, 2).contiguous()
    return data.contiguous(), scale


def _is_scaled(weight: Quantised, dtype: torch.dtype) -> bool:
    """Whether the weight is multiplied with plain rows instead of rows of integers. Both are possible for int4: plain
    bfloat16 rows are a third faster if there are many; integers support any number of inputs."""
    if weight.kind != "int4":
        return weight.kind in ("fp8", "nvfp4")
    plain = dtype == torch.bfloat16 and weight.in_features % STEPS[Kind.UINT4] == 0
    return plain or weight.zeros is not None or weight.group != GROUP or weight.order is not None


def _check_scaled(weight: Quantised, step: int, dtype: torch.dtype) -> None:
    if dtype not in MULTIPLIED:
        raise NativeUnavailable(f"no compiled product with {weight.kind} has rows of {dtype}")
    group, inner = weight.scale_group, weight.in_features
    if inner % step or (group % step and group < inner):
        raise NativeUnavailable(f"{inner} inputs in groups of {group} are not multiples of {step}")
    if weight.kind == "int4":
        return
    octets = (weight.values if weight.kind == "fp8" else weight.scale).contiguous().view(torch.uint8)
    if bool(((octets & 127) == 127).any()):
        raise NativeUnavailable("an e4m3 number is not a number")
    if weight.kind == "nvfp4" and bool((octets > 127).any()):
        raise NativeUnavailable("a scale is negative")


def _pack_fp8(weight: Quantised) -> Tensor:
    """`[panels, k / 4, 4, 64]` bytes."""
    return _in_fours(F.pad(weight.values.contiguous().view(torch.uint8), (0, 0, 0, -weight.shape[0] % PANEL)))


def _in_fours(octets: Tensor) -> Tensor:
    """`[n, k]` -> `[panels, k / 4, 4, 64]`: 4 inputs of 16 outputs, in the order in which they are unpacked."""
    chunks = octets.shape[1] // 4
    pairs = octets.contiguous().view(torch.int16)  # moved together, which takes a third of the time
    panels = pairs.view(-1, 4, 4, 4, chunks, 2)  # panel, vector, lane, output, chunk, pair
    return panels.permute(0, 4, 1, 2, 5, 3).contiguous().view(torch.uint8).view(-1, chunks, 4, PANEL)


def _pack_nvfp4(weight: Quantised) -> Tensor:
    """`[panels, k / 16, 576]` bytes: 64 scales, then, for each 8 inputs, 4 in the low halves and 4 in the high
    halves."""
    below = -weight.shape[0] % PANEL
    octets = weight.scale.contiguous().view(torch.uint8)
    codes = _codes(weight).view(*octets.shape, NVFP4_GROUP) * (octets != 0)[..., None]
    fours = _in_fours(F.pad(codes.flatten(1), (0, 0, 0, below)))
    numbers = (fours[:, 0::2] | fours[:, 1::2] << 4).view(fours.shape[0], octets.shape[1], -1)
    scales = _group_panels(_scale_bytes()[octets.long()])
    return torch.cat((scales, numbers), 2)


@cache
def _scale_bytes() -> Tensor:
    """For each non-negative e4m3 byte, the byte that the compiled code reads. For (1 + m / 8) * 2^(8 - d): m in bits 4
    to 6, the lowest bit of d in bit 7, the others in bits 0 to 3; 0 for zero and NaN."""
    values = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    fraction, exponent = torch.frexp(values)
    m, d = (fraction * 16 - 8).to(torch.uint8), (9 - exponent).to(torch.uint8)
    return torch.where(values > 0, m << 4 | (d & 1) << 7 | d >> 1, 0)


def _codes(weight: Quantised) -> Tensor:
    """uint8 `[n, k]`, four-bit codes."""
    return torch.stack((weight.values & 15, weight.values >> 4), -1).flatten(-2)[:, : weight.in_features]


def _pack_nibbles(weight: Quantised) -> Tensor:
    """`[panels, k / 8, 4, 16, 2]` words as pairs of bytes: even and odd inputs of 16 outputs, four numbers each."""
    codes = F.pad(_codes(weight), (0, 0, 0, -weight.shape[0] % PANEL))
    panels = codes.view(-1, 4, 16, codes.shape[1] // 8, 4, 2)  # panel, vector, output, chunk, pair, parity
    words = panels.permute(0, 3, 1, 2, 5, 4)
    return (words[..., 0::2] | words[..., 1::2] << 4).contiguous()


def _group_panels(scales: Tensor) -> Tensor:
    """`[n, groups]` -> `[panels, groups, 64]`."""
    n, groups = scales.shape
    return F.pad(scales, (0, 0, 0, -n % PANEL)).view(-1, PANEL, groups).transpose(1, 2).contiguous()


class _Interleaved:
    """Order of the rows of a gated weight: 16 gates, then the 16 outputs that they gate, and so on; padded with
    zeros."""

    def __init__(self, inner: int) -> None:
        gates = torch.arange(-(-inner // GATES) * GATES).view(-1, GATES)
        order = torch.stack((gates, gates + inner), 1).flatten()
        self.exists = (gates < inner).repeat(1, 2).flatten()
        self.source = torch.where(self.exists, order, 0)

    def rows(self, weight: Tensor | Quantised, begin: int, end: int) -> Tensor | Quantised:
        """Copies of rows [begin, end) of the interleaved weight."""
        found = _rows(weight, self.source[begin:end])
        if isinstance(found, Tensor):
            return self._zeroed(found, begin, end)
        return replace(found, scale=self._zeroed(found.scale, begin, end).view(found.scale.dtype))

    def _zeroed(self, of: Tensor, begin: int, end: int) -> Tensor:
        of = of.view(torch.uint8) if of.dtype == torch.float8_e4m3fn else of
        return of.mul_(self.exists[begin:end].view(-1, *[1] * (of.dim() - 1)))


def interleaved(bias: Tensor) -> Tensor:
    """The bias of a gated weight, in the order of its rows."""
    order = _Interleaved(bias.shape[0] // 2)
    found = order.rows(bias, 0, len(order.source))
    assert isinstance(found, Tensor)
    return found
