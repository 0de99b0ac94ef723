"""Numbers of a GGUF file's tensors, as torch tensors.

F32, F16 and BF16 keep their numbers. `PACKED` has the types that are integers times a scale for each 16 or 32 inputs,
as this server's own forms are. Other types are dequantised by the `gguf` package in float32, and rounded to the dtype
that is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import IQ4_NL, MXFP4, dequantize
from torch import Tensor

from families import CheckpointError
from families.gguf_weights import Inverse
from kernels.linear import Quantised, quantise
from kernels.linear.quantised import pack_nibbles
from kernels.weight_forms import kind_and_group
from service.model.gguf.file import StoredTensor

EXACT = {Type.F32: torch.float32, Type.F16: torch.float16, Type.BF16: torch.bfloat16}
"""Types whose numbers torch has."""
AT_ONCE = 1 << 24
"""Numbers that are dequantised at a time."""


Blocks = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Reads blocks `[..., bytes of a block]`: (integers `[..., numbers of a block]`, scales `[..., scales of a block]`)."""


def _halves(octets: Tensor) -> Tensor:
    """Numbers in float16, as float32: two bytes each."""
    return octets.contiguous().view(torch.float16).float()


def _bits(octets: Tensor, width: int, shifts: Sequence[int], mask: int) -> Tensor:
    """Numbers of a few bits each, of runs of `width` bytes: those at the first shift of a run's bytes, then those at
    the next. `[..., bytes]` -> uint8 `[..., bytes * shifts]`."""
    places = torch.tensor(shifts, dtype=torch.uint8)[:, None]
    return (octets.unflatten(-1, (-1, 1, width)) >> places & mask).flatten(-3)


def _q4_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    return _bits(blocks[..., 2:], 16, (0, 4), 15).to(torch.int8) - 8, _halves(blocks[..., :2])


def _q8_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    return blocks[..., 2:].view(torch.int8), _halves(blocks[..., :2])


def _q5_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    high, low = _bits(blocks[..., 2:6], 1, range(8), 1), _bits(blocks[..., 6:], 16, (0, 4), 15)
    return (low | high << 4).to(torch.int8) - 16, _halves(blocks[..., :2])


def _q3_k(blocks: Tensor) -> tuple[Tensor, Tensor]:
    low, high = _bits(blocks[..., 32:96], 32, (0, 2, 4, 6), 3), _bits(blocks[..., :32], 32, range(8), 1)
    scales = _bits(blocks[..., 96:104], 8, (0, 4), 15) | _bits(blocks[..., 104:108], 4, (0, 2, 4, 6), 3) << 4
    return (low | high << 2).to(torch.int8) - 4, _halves(blocks[..., 108:]) * (scales.to(torch.int8) - 32)


def _q6_k(blocks: Tensor) -> tuple[Tensor, Tensor]:
    low, high = _bits(blocks[..., :128], 64, (0, 4), 15), _bits(blocks[..., 128:192], 32, (0, 2, 4, 6), 3)
    scales = blocks[..., 192:208].view(torch.int8)
    return (low | high << 4).to(torch.int8) - 32, _halves(blocks[..., 208:]) * scales


_LEVELS = torch.tensor(IQ4_NL.kvalues, dtype=torch.int8)
_DOUBLED_E2M1 = torch.tensor(MXFP4.kvalues, dtype=torch.int8)


def _iq4_nl(blocks: Tensor) -> tuple[Tensor, Tensor]:
    return _LEVELS[_bits(blocks[..., 2:], 16, (0, 4), 15).int()], _halves(blocks[..., :2])


def _iq4_xs(blocks: Tensor) -> tuple[Tensor, Tensor]:
    scales = _bits(blocks[..., 4:8], 1, (0, 4), 15) | _bits(blocks[..., 2:4], 1, (0, 2, 4, 6), 3) << 4
    numbers = _LEVELS[_bits(blocks[..., 8:], 16, (0, 4), 15).int()]
    return numbers, _halves(blocks[..., :2]) * (scales.to(torch.int8) - 32)


def _mxfp4(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """A scale is 2^(byte - 127); its half, because numbers are doubled, is not a normal number for bytes 0 and 1."""
    exponent = blocks[..., :1].int()
    scales = torch.where(exponent < 2, 1 << exponent + 21, exponent - 1 << 23).view(torch.float32)
    return _DOUBLED_E2M1[_bits(blocks[..., 1:], 16, (0, 4), 15).int()], scales


PACKED: dict[Type, tuple[str, Blocks]] = {
    Type.Q4_0: ("int4-32", _q4_0),
    Type.Q3_K: ("int4-16", _q3_k),
    Type.Q8_0: ("int8-32", _q8_0),
    Type.Q5_0: ("int8-32", _q5_0),
    Type.Q6_K: ("int8-16", _q6_k),
    Type.IQ4_NL: ("int8-32", _iq4_nl),
    Type.IQ4_XS: ("int8-32", _iq4_xs),
    Type.MXFP4: ("int8-32", _mxfp4),
}
"""Types that this server can store as they are, their form, and how their blocks are read."""


def plain(stored: StoredTensor) -> Tensor:
    """A copy of a tensor of one of the `EXACT` types. Raises CheckpointError for NaN and infinity."""
    found = torch.from_numpy(np.array(stored.data)).view(EXACT[stored.type]).view(stored.shape)
    _check_finite(stored, found)
    return found


def packed(stored: StoredTensor) -> Quantised:
    """A copy of a tensor of one of the `PACKED` types, without a change of any number. Raises CheckpointError for NaN
    and infinity."""
    form, read = PACKED[stored.type]
    kind, group = kind_and_group(form)
    assert group is not None
    *rows, inner = stored.shape
    block, octets = GGML_QUANT_SIZES[stored.type]
    count, fours = math.prod(rows), kind == "int4"
    values = torch.empty(count, inner // 2 if fours else inner, dtype=torch.uint8 if fours else torch.int8)
    scale = torch.empty(count, inner // group)
    for part, data in _pieces(stored):
        numbers, scales = read(torch.from_numpy(np.array(data)).view(-1, inner // block, octets))
        _check_finite(stored, scales * 128)  # no number is larger
        values[part] = pack_nibbles(numbers.flatten(1) + 8) if fours else numbers.flatten(1)
        scale[part] = scales.flatten(1)
    return Quantised(kind, values, scale, inner, group).in_shape(rows)


class Rounding(NamedTuple):
    """What rounding changes."""

    error: float = 0.0
    """Sum of the squares of the changes."""
    total: float = 0.0
    """Sum of the squares of the numbers."""

    @classmethod
    def of(cls, exact: Tensor, found: Tensor) -> Rounding:
        wanted = exact.double()
        return cls(float((found.double() - wanted).square_().sum()), float(wanted.square().sum()))

    def plus(self, other: Rounding) -> Rounding:
        """Both together."""
        return Rounding(self.error + other.error, self.total + other.total)

    @property
    def relative(self) -> float:
        """The root mean square of the changes, relative to that of the numbers."""
        return math.sqrt(self.error / self.total) if self.total else 0.0


def rounded(stored: StoredTensor, dtype: torch.dtype) -> tuple[Tensor, Rounding]:
    """The numbers of a tensor in `dtype`. Raises CheckpointError for types that the package cannot read, and for NaN
    and infinity."""
    found, rounding = torch.empty(math.prod(stored.shape[:-1]), stored.shape[-1], dtype=dtype), Rounding()
    for rows, exact in _dequantised(stored):
        found[rows] = exact
        rounding = rounding.plus(Rounding.of(exact, found[rows]))
    return found.view(stored.shape), rounding


def requantised(
    stored: StoredTensor, form: str, change: Callable[[Tensor], Tensor] | None = None
) -> tuple[Quantised, Rounding]:
    """A tensor quantised again, to one of `kernels.weight_forms.FORMS`, after `change`, which affects no rows, if it is
    given. Raises CheckpointError like `rounded`."""
    count, whole, rounding = math.prod(stored.shape[:-1]), None, Rounding()
    for rows, exact in _dequantised(stored):
        wanted = exact if change is None else change(exact)
        part = quantise(wanted, form)
        whole = whole or part.map(lambda tensor: tensor.new_empty(count, *tensor.shape[1:]))
        for tensor, found in zip(whole.tensors, part.tensors, strict=True):
            tensor[rows] = found
        rounding = rounding.plus(Rounding.of(wanted, part.dequantise()))
    assert whole is not None, "a tensor without rows"
    return whole.in_shape(stored.shape[:-1]), rounding


def _pieces(stored: StoredTensor) -> Iterator[tuple[slice, np.ndarray[Any, Any]]]:
    """(rows, the bytes of their blocks) of a quantised tensor, about `AT_ONCE` numbers at a time."""
    count = math.prod(stored.shape[:-1])
    octets, step = stored.data.reshape(count, -1), max(1, AT_ONCE // stored.shape[-1])
    for first in range(0, count, step):
        yield slice(first, first + step), octets[first : first + step]


def _dequantised(stored: StoredTensor) -> Iterator[tuple[slice, Tensor]]:
    """(rows, their numbers in float32). Raises CheckpointError."""
    for rows, data in _pieces(stored):
        try:
            exact = torch.from_numpy(dequantize(np.asarray(data), stored.type))
        except NotImplementedError:
            raise CheckpointError(f"{stored.name} has type {stored.type.name}, which cannot be dequantised") from None
        _check_finite(stored, exact)
        yield rows, exact


def bytes_of(shape: tuple[int, ...], kind: Type) -> int:
    """Bytes of a tensor in a file."""
    block, size = GGML_QUANT_SIZES[kind]
    return math.prod(shape) // block * size


def undone(stored: Tensor, inverse: Inverse) -> Tensor:
    """The numbers before the converter's change, in float32: those of bfloat16 if the change makes the stored numbers
    of them, since then they were published in it; else the nearest float32 numbers that the change makes them of."""
    wanted = stored.float()
    found = inverse.back(wanted)
    short = found.bfloat16().float()
    if bool(_same(inverse, short, wanted).all()):
        return short
    for _ in range(2):  # the logarithm is rounded: its neighbours may be nearer
        for direction in (math.inf, -math.inf):
            other = torch.nextafter(found, torch.full_like(found, direction))
            better = (inverse.forward(other) - wanted).abs() < (inverse.forward(found) - wanted).abs()
            found = torch.where(better, other, found)
    return found


def _same(inverse: Inverse, weight: Tensor, wanted: Tensor) -> Tensor:
    return (inverse.forward(weight) - wanted).abs() <= inverse.tolerance * wanted.abs()


def narrowed(weight: Tensor) -> Tensor:
    """A weight in bfloat16 if that changes no number, else as it is."""
    short = weight.bfloat16()
    return short if torch.equal(short.to(weight.dtype), weight) else weight


def _check_finite(stored: StoredTensor, numbers: Tensor) -> None:
    finite = torch.isfinite(numbers)
    if not bool(finite.all()):
        count = numbers.numel() - int(finite.sum())
        raise CheckpointError(f"{stored.name}: {count} of {numbers.numel()} numbers are NaN or infinite")
