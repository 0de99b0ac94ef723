"""Converts the stored parts of a quantised weight to `kernels.linear.Quantised`. No value changes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.linear import Quantised
from kernels.linear.quantised import pack_nibbles, unpack_nibbles
from kernels.weight_forms import kind_and_group
from service.model.formats.tensors import OF_ROWS, PACKED, FormatError, StoredWeight

Read = Callable[[str], Tensor]
"""Reads a stored tensor by name."""
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of a word that has each of eight neighbouring outputs."""


def load(weight: StoredWeight, read: Read, *, gptq_offset: int = 1) -> Tensor | Quantised:
    """The weight; a plain one as stored. `gptq_offset`: offset that GPTQ's stored zero points lack. Raises FormatError
    with the module's name for invalid values."""
    if weight.scheme == "plain":
        return _numbers(weight, read(weight.parts["values"]))
    parts = {role: read(name) for role, name in weight.parts.items() if role not in OF_ROWS}
    try:
        match weight.scheme:
            case "own":
                return _own(weight, parts)
            case "fp8-tensor" | "fp8-channel" | "fp8-block":
                return _fp8(weight, parts)
            case "nvfp4":
                return _nvfp4(weight, parts)
            case "int8":
                return _int8(weight, parts)
            case "int4" | "int8-packed":
                return _packed(weight, parts)
            case "gptq" | "gptq-int8":
                return _gptq(weight, parts, gptq_offset)
            case "awq":
                return _awq(weight, parts)
    except FormatError:
        raise
    except (ValueError, RuntimeError) as error:
        raise FormatError(f"{weight.module}: {error}") from error
    raise AssertionError(weight.scheme)


def _numbers(weight: StoredWeight, values: Tensor) -> Tensor:
    """A plain weight, checked: one NaN in it would make every answer meaningless, without an error."""
    if values.is_floating_point() and values.numel():
        low, high = torch.aminmax(values)
        if not bool(torch.isfinite(low.float()) & torch.isfinite(high.float())):
            count = values.numel() - int(torch.isfinite(values.float()).sum())
            raise FormatError(f"{weight.module}: {count} of {values.numel()} numbers are NaN or infinite")
    return values


def _finite(weight: StoredWeight, scale: Tensor) -> Tensor:
    if not bool(torch.isfinite(scale.float()).all()):
        raise FormatError(f"{weight.module}: a scale is not finite")
    return scale


def _own(weight: StoredWeight, parts: dict[str, Tensor]) -> Quantised:
    kind, inner, scale = kind_and_group(weight.form)[0], weight.shape[-1], parts["scale"]
    if kind == "nvfp4":
        return Quantised(kind, parts["values"], scale, inner, outer=parts["outer"])
    if scale.dim() < parts["values"].dim():
        scale = scale[..., None]  # a scale for each row
    if scale.dtype == torch.float16:
        scale = scale.float()
    return Quantised(kind, parts["values"], _finite(weight, scale), inner, group=weight.group or inner)


def _fp8(weight: StoredWeight, parts: dict[str, Tensor]) -> Quantised:
    *lead, rows, inner = weight.shape
    scale = _finite(weight, parts["scale"].float())
    if any(int(parts["values"].view(dtype).max()) == torch.iinfo(dtype).max for dtype in (torch.uint8, torch.int8)):
        raise FormatError(f"{weight.module}: a number is NaN")
    if weight.scheme == "fp8-tensor":
        scale = scale.reshape(*lead, 1, 1).expand(*lead, rows, 1)
    elif weight.scheme == "fp8-channel":
        scale = scale.reshape(*lead, rows, 1)
    else:
        blocks = -(-rows // weight.block_rows), -(-inner // weight.group)
        scale = scale.reshape(*lead, *blocks).repeat_interleave(weight.block_rows, -2)[..., :rows, :]
    return Quantised("fp8", parts["values"], scale.contiguous(), inner, group=weight.group)


def _nvfp4(weight: StoredWeight, parts: dict[str, Tensor]) -> Quantised:
    *lead, rows, inner = weight.shape
    divided = "divisor" in parts
    outer = _finite(weight, parts["divisor" if divided else "outer"].float())
    if divided and not bool((outer != 0).all()):
        raise FormatError(f"{weight.module}: its weight_global_scale is 0")
    outer = outer.reshape(*lead, 1).expand(*lead, rows).contiguous()
    scale = _finite(weight, parts["scale"])
    return Quantised("nvfp4", parts["values"], scale, inner, outer=outer, divided=divided)


def _int8(weight: StoredWeight, parts: dict[str, Tensor]) -> Quantised:
    """compressed-tensors' int-quantized: w = (value - zero) * scale, both signed."""
    values, inner = parts["values"], weight.shape[-1]
    scale = _finite(weight, parts["scale"].float()).reshape(*values.shape[:-1], -1).contiguous()
    zeros = None if "zeros" not in parts else _flipped(parts["zeros"]).reshape(scale.shape)
    order = None
    if "groups" in parts:
        order = _order(weight, parts["groups"], scale.shape[-1], inner, weight.group)
    if order is not None:
        values = values[:, order]
    return Quantised("int8", values, scale, inner, weight.group, zeros, order=order)


def _packed(weight: StoredWeight, parts: dict[str, Tensor]) -> Quantised:
    """compressed-tensors' pack-quantized: values and zero points as unsigned numbers, 8 or 128 higher."""
    words, scale = parts["values"], _finite(weight, parts["scale"].float())
    (rows, inner), groups, group = weight.shape, scale.shape[1], weight.group
    stored = [int(number) for number in parts["shape"].flatten().tolist()]
    if stored != [rows, inner]:
        raise FormatError(f"{weight.module}: weight_shape is {stored}, not {[rows, inner]}")
    if -(-inner // group) != groups:
        raise FormatError(f"{weight.module}: {groups} groups of {group} do not cover {inner} inputs")
    bits, zeros = 32 // PACKED[weight.scheme], None
    if "zeros" in parts:
        zeros = _words(parts["zeros"].t(), bits).t()[:rows].contiguous()  # packed along the outputs
    order = None if "groups" not in parts else _order(weight, parts["groups"], groups, inner, group)
    return _integers(bits, _words(words, bits)[:, :inner], scale, weight, zeros, order)


def _gptq(weight: StoredWeight, parts: dict[str, Tensor], offset: int) -> Quantised:
    """Stored zero points of version 1 are one lower. GPTQModel, also as transformers uses it, subtracts and adds whole
    words: a zero point of 0 is stored as the highest number, and takes one from the number above it in the word."""
    inner, scale = weight.shape[1], _finite(weight, parts["scale"].float())
    bits = 4 if weight.scheme == "gptq" else 8
    ones = {4: 0x11111111, 8: 0x01010101}[bits]
    values = _words(parts["values"].t(), bits)  # of inputs
    zeros = _words(parts["zeros"] + offset * ones, bits).t().contiguous()
    order = None if "groups" not in parts else _order(weight, parts["groups"], scale.shape[0], inner, weight.group)
    return _integers(bits, values, scale.t(), weight, zeros, order)


def _integers(
    bits: int, values: Tensor, scale: Tensor, weight: StoredWeight, zeros: Tensor | None, order: Tensor | None
) -> Quantised:
    """An int4 or int8 weight of unsigned values `[n, k]`, whose inputs are in order."""
    if order is not None:
        values = values[:, order]
    kind, stored = ("int4", pack_nibbles(values)) if bits == 4 else ("int8", _flipped(values))
    return Quantised(kind, stored, scale.contiguous(), weight.shape[1], weight.group, zeros, order=order)


def _awq(weight: StoredWeight, parts: dict[str, Tensor]) -> Quantised:
    inner, scale = weight.shape[1], _finite(weight, parts["scale"].float())
    places = torch.tensor(AWQ_ORDER)

    def outputs(words: Tensor) -> Tensor:
        return _words(words, 4).unflatten(-1, (-1, 8))[..., places].flatten(-2)

    values, zeros = outputs(parts["values"]).t(), outputs(parts["zeros"]).t()
    return Quantised("int4", pack_nibbles(values), scale.t().contiguous(), inner, weight.group, zeros.contiguous())


def _order(weight: StoredWeight, group_of: Tensor, groups: int, inner: int, group: int) -> Tensor | None:
    """Columns sorted by their group; None if they are sorted already. Only the last group may have fewer inputs."""
    counts = torch.bincount(group_of.long().clamp(0, groups), minlength=groups)
    wanted = torch.full((groups,), group)
    wanted[-1] = inner - group * (groups - 1)
    if bool((group_of < 0).any()) or not torch.equal(counts, wanted):
        raise FormatError(f"{weight.module}: g_idx does not put {group} inputs into each of {groups} groups")
    order = torch.argsort(group_of.long(), stable=True)
    return None if torch.equal(order, torch.arange(inner)) else order


def _words(words: Tensor, bits: int) -> Tensor:
    """int32 `[..., w]` -> uint8 `[..., 32 / bits * w]`: the numbers of 4 or 8 bits of each word, lowest first."""
    octets = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)  # little-endian
    return octets if bits == 8 else unpack_nibbles(octets)


def _flipped(octets: Tensor) -> Tensor:
    """The signed numbers 128 below unsigned ones, or the unsigned ones 128 above signed ones; contiguous."""
    other = torch.int8 if octets.dtype == torch.uint8 else torch.uint8
    return (octets.contiguous().view(torch.uint8) ^ 128).view(other)
