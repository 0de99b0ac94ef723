"""Numbers of a GGUF file's tensors, as torch tensors.

F32, F16 and BF16 keep their numbers. Q4_0 has a scale and 16 levels for each 32 inputs, which is this server's own
`int4-32`. Other types are dequantised by the `gguf` package in float32, and rounded to the dtype that is asked for.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize
from torch import Tensor

from families import CheckpointError
from families.gguf_weights import Inverse
from kernels.linear import Quantised
from kernels.linear.quantised import pack_nibbles, unpack_nibbles
from service.model.gguf.file import StoredTensor

EXACT = {Type.F32: torch.float32, Type.F16: torch.float16, Type.BF16: torch.bfloat16}
"""Types whose numbers torch has."""
PACKED, PACKED_FORM = Type.Q4_0, "int4-32"
"""The type that this server can store as it is, and its form."""
AT_ONCE = 1 << 24
"""Numbers that are dequantised at a time."""


def plain(stored: StoredTensor) -> Tensor:
    """A copy of a tensor of one of the `EXACT` types. Raises CheckpointError for NaN and infinity."""
    found = torch.from_numpy(np.array(stored.data)).view(EXACT[stored.type]).view(stored.shape)
    _check_finite(stored, found)
    return found


def packed(stored: StoredTensor) -> Quantised:
    """A copy of a Q4_0 tensor, without a change of any number. A block has its scale in float16 and 16 bytes: byte i
    has input i in its low half and input i + 16 in its high half."""
    rows, groups = stored.shape[:-1], stored.shape[-1] // 32
    blocks = torch.from_numpy(np.array(stored.data)).view(*rows, groups, 18)
    scale = blocks[..., :2].contiguous().view(torch.float16).view(*rows, groups).float()
    _check_finite(stored, scale)
    codes = unpack_nibbles(blocks[..., 2:]).unflatten(-1, (16, 2)).transpose(-1, -2).flatten(-3)
    return Quantised("int4", pack_nibbles(codes), scale.contiguous(), stored.shape[-1], group=32)


def rounded(stored: StoredTensor, dtype: torch.dtype) -> tuple[Tensor, float]:
    """(the numbers of a tensor in `dtype`, the root mean square of what rounding changes, relative to that of the
    numbers). Raises CheckpointError for types that the package cannot read, and for NaN and infinity."""
    *rows, inner = stored.shape
    count = math.prod(rows)
    octets = stored.data.reshape(count, -1)
    found = torch.empty(count, inner, dtype=dtype)
    error = total = 0.0
    step = max(1, AT_ONCE // inner)
    for first in range(0, count, step):
        try:
            exact = torch.from_numpy(dequantize(np.asarray(octets[first : first + step]), stored.type))
        except NotImplementedError:
            raise CheckpointError(f"{stored.name} has type {stored.type.name}, which cannot be dequantised") from None
        _check_finite(stored, exact)
        part = found[first : first + step]
        part.copy_(exact)
        error += float((part.float() - exact).double().square().sum())
        total += float(exact.double().square().sum())
    return found.view(stored.shape), math.sqrt(error / total) if total else 0.0


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
